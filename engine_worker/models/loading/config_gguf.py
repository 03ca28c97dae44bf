"""GGUF metadata -> ModelConfig. Refuses what the engine would compute differently."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_worker.errors import LoadError
from engine_worker.layers.rope import RopeConfig
from engine_worker.models.config import ModelConfig, resolve_dtype, resolve_length
from engine_worker.models.loading.gguf_file import GgufFile

__all__ = ["config_from_gguf", "has_interleaved_heads"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to the architecture's own keys, with errors that name the key."""

    file: GgufFile
    prefix: str

    def has(self, name: str) -> bool:
        return f"{self.prefix}.{name}" in self.file.metadata

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.file.metadata.get(f"{self.prefix}.{name}", default)
        if isinstance(value, list) and value and len(set(map(str, value))) == 1:
            value = value[0]  # one value a layer, all alike
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LoadError(f"{self.file.path}: {self.prefix}.{name} is {value!r}, a positive integer is needed.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.prefix}.{name}", default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise LoadError(f"{self.file.path}: {self.prefix}.{name} is {value!r}, a positive number is needed.")
        return float(value)


def has_interleaved_heads(config: ModelConfig) -> bool:
    """Whether files of this architecture keep rotary pairs side by side (see `GgufCheckpoint`)."""
    return config.architecture == "LlamaForCausalLM"


def config_from_gguf(file: GgufFile, *, dtype: str, device: torch.device, max_model_len: int | None) -> ModelConfig:
    """`dtype` and `max_model_len` as the user asked for them. Raises LoadError naming the key."""
    prefix = file.metadata.get("general.architecture")
    if not isinstance(prefix, str) or prefix not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise LoadError(f"{file.path}: the architecture {prefix!r} is not supported. Supported in GGUF files: {known}.")
    fields = _Fields(file, prefix)
    _refuse_unsupported(file, fields)
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    kv_heads = fields.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise LoadError(f"{file.path}: {heads} attention heads cannot share {kv_heads} key-value heads evenly.")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    trained = fields.integer("context_length")
    return ModelConfig(
        architecture=_ARCHITECTURES[prefix],
        vocab_size=file.tensors[_EMBEDDING].shape[0],
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=trained,
        max_model_len=resolve_length(trained, max_model_len),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, fields, head_dim),
        dtype=resolve_dtype(dtype, _declared_dtype(file), device),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
    )


def _refuse_unsupported(file: GgufFile, fields: _Fields) -> None:
    split = file.metadata.get("split.count", 1)
    if isinstance(split, int) and split > 1:
        raise LoadError(f"{file.path} is one of {split} parts of a split model; merge them (gguf-split --merge) first.")
    if fields.has("expert_count") and fields.integer("expert_count", 1) > 1:
        raise LoadError(f"{file.path}: mixture-of-experts models are not supported.")
    if _EMBEDDING not in file.tensors:
        raise LoadError(f"{file.path}: the tensor {_EMBEDDING!r} is missing.")


def _declared_dtype(file: GgufFile) -> str | None:
    """A float type only where all matrices are kept in it; a quantised file says nothing about a compute dtype."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kinds.pop()) if len(kinds) == 1 else None


def _rope(file: GgufFile, fields: _Fields, head_dim: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.raw(file.tensors["rope_freqs.weight"]).view(torch.float32).flatten().tolist())
    kind = file.metadata.get(f"{fields.prefix}.rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta, rotary_dim, frequency_divisors=divisors)
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, "linear", factor, frequency_divisors=divisors)
    raise LoadError(f"{file.path}: the rope scaling {kind!r} is not supported (none and linear are).")
