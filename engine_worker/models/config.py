"""What the engine must know of a model's shape. Made from a Hugging Face config.json or GGUF metadata, read by
everyone.

Both parsers refuse what this engine would compute wrongly (unknown activation, unknown rope variant) instead of
ignoring it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine_worker.layers.rope import RopeConfig

__all__ = ["DTYPES", "ModelConfig"]

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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
    """Of weights, activations and cache: float32, bfloat16 or float16."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return DTYPES[self.dtype]

    def kv_bytes_per_token(self) -> int:
        """Cache bytes one token takes in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.torch_dtype.itemsize
