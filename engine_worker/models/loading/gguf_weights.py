"""Weights of a GGUF file under their Hugging Face names, expanded or as blocks, straight into their destination."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine_worker.errors import LoadError
from engine_worker.models.loading.checkpoint import TensorInfo
from engine_worker.models.loading.gguf_file import GgufFile, GgufTensor
from engine_worker.quant.blocks import blocks_into
from engine_worker.quant.dequantize import dequantize_into

__all__ = ["GgufCheckpoint"]

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint:
    """A `Checkpoint`.

    `interleaved` heads (GGUF's "llama" architecture): the file keeps the two halves of each rotary pair next to each
    other in the rows of Q and K; they are put back to Hugging Face's half-split order while loading.
    """

    def __init__(self, file: GgufFile, *, interleaved: bool, num_heads: int, num_kv_heads: int) -> None:
        self._file = file
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads} if interleaved else {}
        self._sources = {_hugging_face_name(name): tensor for name, tensor in file.tensors.items()}
        self._tensors = {
            name: TensorInfo(tensor.shape, tensor.kind.name, tensor.num_bytes) for name, tensor in self._sources.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `Checkpoint`."""
        return self._tensors

    def read(self, name: str, destination: Tensor) -> None:
        """See `Checkpoint`."""
        tensor = self._sources[name]
        raw = self._file.raw(tensor)
        heads = self._heads.get(name.split(".")[-2])
        if heads is not None:
            raw = raw.index_select(0, half_split_order(tensor.shape[0], heads))
        if destination.dtype is torch.uint8:
            blocks_into(raw, tensor.kind, destination)
            return
        dequantize_into(raw, tensor.kind, destination if destination.dim() > 1 else destination.unsqueeze(1))

    def sample(self, name: str, size: int) -> bytes:
        """See `Checkpoint`."""
        return self._raw_head(self._sources[name], size)

    def _raw_head(self, tensor: GgufTensor, size: int) -> bytes:
        return self._file.raw(tensor).flatten()[:size].numpy().tobytes()


def half_split_order(rows: int, heads: int) -> Tensor:
    """int64 [rows]: which row of the file stands at each row of the Hugging Face matrix."""
    if rows % (2 * heads):
        raise LoadError(f"A projection of {rows} rows cannot be split into {heads} heads of rotary pairs.")
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _hugging_face_name(name: str) -> str:
    """Unknown names stay as they are; the loader then refuses them."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{kind}"
    return name
