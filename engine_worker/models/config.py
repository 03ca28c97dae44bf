"""What the engine must know of a model's shape. Made from a Hugging Face config.json or GGUF metadata, read by
everyone.

Both parsers refuse what this engine would compute wrongly (unknown activation, unknown rope variant) instead of
ignoring it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine_worker.errors import LoadError
from engine_worker.layers.rope import RopeConfig
from kernels.ops import kv_cache_bytes

__all__ = ["CACHE_DTYPES", "DTYPES", "ModelConfig", "prefer_exact", "resolve_dtype", "resolve_length"]

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CACHE_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
"""What --kv-cache-dtype allows beside auto."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of one decoder-only model, after dtype and length were decided."""

    architecture: str
    """Name in the registry of models, e.g. "LlamaForCausalLM"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Positions the model was trained for (after rope scaling)."""
    max_model_len: int
    """Positions it is served with, <= max_position_embeddings: the window of prompt + output."""
    rms_norm_eps: float
    rope: RopeConfig
    dtype: str
    """Of weights and activations: float32, bfloat16 or float16."""
    kv_cache_dtype: str = "auto"
    """Of the cache's pages: one of CACHE_DTYPES, or auto for `dtype`."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return DTYPES[self.dtype]

    def num_parameters(self) -> int:
        """Numbers in the weight matrices (biases and norms are nothing beside them)."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings

    @property
    def cache_torch_dtype(self) -> torch.dtype:
        """`kv_cache_dtype` as torch's."""
        return self.torch_dtype if self.kv_cache_dtype == "auto" else CACHE_DTYPES[self.kv_cache_dtype]

    def kv_bytes_per_token(self) -> int:
        """Cache bytes one token takes in all layers."""
        return kv_cache_bytes(self.num_layers, 1, 1, self.num_kv_heads, self.head_dim, self.cache_torch_dtype)


_EXACT_UP_TO = 500_000_000
"""Parameters up to which "auto" means float32 on a CPU: there an answer does not depend on what runs beside it."""


def prefer_exact(config: ModelConfig, requested: str, device: torch.device) -> ModelConfig:
    """What "auto" means once the size is known: a small model on a CPU is served in float32 (decision 0005), any other
    as `resolve_dtype` found."""
    small = requested == "auto" and device.type == "cpu" and config.num_parameters() <= _EXACT_UP_TO
    return replace(config, dtype="float32") if small else config


def resolve_dtype(requested: str, declared: str | None, device: torch.device) -> str:
    """The dtype to serve with. `requested` is "auto" or a name of DTYPES, `declared` what the checkpoint was saved in.

    "auto" takes the checkpoint's own (see `prefer_exact` for small models), and bfloat16 where it has none (quantised
    files). A CPU gets bfloat16 only when it has instructions for it, else float32; float16 is slow on CPUs and
    becomes the same as bfloat16 there.
    """
    if requested in DTYPES:
        return requested
    if requested != "auto":
        raise LoadError(f"The dtype {requested!r} is unknown. Allowed: auto, {', '.join(DTYPES)}.")
    dtype = declared if declared is not None and declared in DTYPES else "bfloat16"
    if device.type == "cpu" and dtype != "float32":
        return "bfloat16" if _cpu_has_bfloat16() else "float32"
    return dtype


def _cpu_has_bfloat16() -> bool:
    if platform.machine().lower() in {"aarch64", "arm64"}:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def resolve_length(trained: int, requested: int | None) -> int:
    """The window to serve: the trained one, or the requested one if it is not longer. Raises LoadError."""
    if requested is None:
        return trained
    if not 1 <= requested <= trained:
        raise LoadError(f"max_model_len is {requested}; this model allows 1 to {trained}.")
    return requested
