"""The nouns of a kernel call: where a batch's tokens lie, the paged KV cache, the weights of a layer.

The runner fills `BatchLayout` once a step; models own the weights; the cache belongs to whoever made it (the engine
thread). Nothing here computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "BLOCK_BYTES",
    "AttentionWeights",
    "BatchLayout",
    "KVCache",
    "LayerCache",
    "MlpWeights",
    "ModelOutput",
    "ModelWeights",
    "PackedLinear",
    "QuantizedTensor",
    "RopeTable",
    "kv_cache_bytes",
    "new_kv_cache",
]

BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
"""Bytes of a GGUF block of 32 values, of every block format that kernels may take."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the tokens of one step lie. B rows (sequences) of >= 1 new tokens each, T tokens in all, row after row.

    Row i owns tokens query_start[i] … query_start[i + 1] - 1. They are its last ones: token j of the row sits at
    position seq_lens[i] - query_len + j and may see every position up to its own. A decode is a row of one token. No
    padding rows.
    """

    query_start: Tensor
    """int32 [B + 1], starts at 0, ends at T."""
    seq_lens: Tensor
    """int32 [B], tokens of the row in the cache after this step."""
    block_tables: Tensor
    """int32 [B, max_blocks], block ids in order of position; entries past the row's last block are ignored."""
    slot_mapping: Tensor
    """int64 [T], block id * block size + offset: where each token's key and value go. All different."""
    positions: Tensor
    """int64 [T], position of each token in its sequence."""
    num_tokens: int
    max_query_len: int
    max_seq_len: int


class LayerCache(NamedTuple):
    """One layer's pages, views into a `KVCache`: each [num_blocks, block_size, num_kv_heads, head_dim]; as scales of an
    int8 cache float32 [num_blocks, block_size, num_kv_heads]."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys (already rotated) and values of every layer, in blocks of `block_size` token slots.

    An int8 cache holds round(x / scale), with a scale of its own for each token and head: its largest magnitude / 127.
    """

    layers: tuple[LayerCache, ...]
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of the queries, keys and values that go in; pages may hold another."""
    scales: tuple[LayerCache, ...] = ()
    """Of each layer, where pages are int8; empty elsewhere."""

    @property
    def storage(self) -> torch.dtype:
        """Of the pages."""
        return self.layers[0].key.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages and scales."""
        return sum(page.nbytes for layer in (*self.layers, *self.scales) for page in layer)


class RopeTable(NamedTuple):
    """Rotary angles of every position, float32 [max_positions, rotary_dim / 2] each (scaled for long-context
    variants)."""

    cos: Tensor
    sin: Tensor


class PackedLinear(NamedTuple):
    """A linear layer's weight in the layout its backend is fastest with. Made by `Ops.pack_linear`, read by
    `Ops.linear`."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    packed: bool
    """False: `weight` is plain [out_features, in_features]; True: a layout only the backend that made it can read."""
    format: str = ""
    """How the native CPU backend packed it: float32, bfloat16, int8, q4_0, q4_1, q8_0; empty elsewhere."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight matrix [out_features, in_features] in GGUF blocks of 32 values, row by row, as a file holds them."""

    blocks: Tensor
    """uint8 [out_features, in_features / 32 * bytes of a block]. Rows may be reordered and concatenated like any
    tensor's."""
    format: str
    """q4_0 (18 bytes a block: float16 scale, nibbles), q4_1 (20: scale, minimum, nibbles), q8_0 (34: scale, int8)."""
    in_features: int

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.blocks.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Everything of a layer up to and including the attention's output projection."""

    norm: Tensor
    """[hidden], RMS norm in front of the attention."""
    qkv: PackedLinear
    """Fused rows in order: all query heads, all key heads, all value heads."""
    output: PackedLinear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The gated MLP of a layer."""

    norm: Tensor
    """[hidden], RMS norm in front of the MLP."""
    gate_up: PackedLinear
    """Fused rows in order: gate, up."""
    down: PackedLinear
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A whole model as `Ops.forward` takes it. Keep one object: backends remember what they prepared for it."""

    embedding: PackedLinear
    layers: Sequence[tuple[AttentionWeights, MlpWeights]]
    norm: Tensor
    """[hidden], final RMS norm."""
    eps: float
    head: PackedLinear
    dtype: torch.dtype
    """Of activations."""


class ModelOutput(NamedTuple):
    """What a forward pass gave. A backend may reuse the memory in its next one in the same thread."""

    hidden: Tensor
    """[T, H], final hidden states (normed)."""
    logits: Tensor
    """float32 [W, V] of the tokens whose logits were asked for, in order."""
    best: Tensor
    """int64 [R], the place of the largest of each sampled token's logits, the first of several; NaN counts as that."""
    peaks: Tensor
    """float32 [R], the largest itself."""


def kv_cache_bytes(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, storage: torch.dtype
) -> int:
    """Bytes that a cache of `new_kv_cache` takes whose pages hold `storage`."""
    scale = torch.float32.itemsize if storage is torch.int8 else 0
    return num_layers * 2 * num_blocks * block_size * num_kv_heads * (head_dim * storage.itemsize + scale)


def new_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    storage: torch.dtype | None = None,
) -> KVCache:
    """An empty cache for a model of `dtype`, all zeros, whose pages hold `storage`: a floating-point type or int8; None
    takes `dtype`. On a CPU its pages have no memory until they are written (or `populate` asks for it)."""
    storage = storage or dtype
    shape = (num_layers, 2, num_blocks, block_size, num_kv_heads)
    pages = _zeros((*shape, head_dim), storage, device)
    scales = _zeros(shape, torch.float32, device) if storage is torch.int8 else None
    return KVCache(
        layers=tuple(LayerCache(pages[i, 0], pages[i, 1]) for i in range(num_layers)),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        scales=() if scales is None else tuple(LayerCache(scales[i, 0], scales[i, 1]) for i in range(num_layers)),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    # calloc: the system's zero pages, touched on first write; torch.zeros would touch all of them now.
    raw = torch.from_numpy(np.zeros(size + _ALIGNMENT, dtype=np.uint8))
    start = -raw.data_ptr() % _ALIGNMENT
    return raw[start : start + size].view(dtype).view(shape)
