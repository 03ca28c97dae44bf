"""Weights for the native kernels: packs a plain or GGUF-quantized matrix into one buffer the C++ side reads.

Nothing here is on the step's path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, HrAttention, HrLinear, HrMlp, Library
from kernels.layout import BLOCK_BYTES, AttentionWeights, MlpWeights, PackedLinear, QuantizedTensor

__all__ = [
    "FORMATS",
    "QUANTIZED",
    "Arena",
    "attention_struct",
    "linear_struct",
    "mlp_struct",
    "pack",
    "pointer_array",
]

FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "q4_0": 3, "q4_1": 4, "q8_0": 5}
"""Weight formats with their code in src/types.h."""

QUANTIZED = frozenset({"int8", *BLOCK_BYTES})
"""Formats that are not a plain float type. int8: one scale a row, rotated inputs (src/hadamard.h)."""

_BLOCK = 32
_ALIGNMENT = 64
_LARGE_PAGE = 2 << 20
_PIECE = 64 << 20
_FROM_BLOCKS = -1


def pack(
    library: Library,
    arena: Arena,
    weight: Tensor | QuantizedTensor,
    bias: Tensor | None,
    weight_format: str,
    threads: int,
) -> PackedLinear:
    """weight [out, in] of float32 or bfloat16, or GGUF blocks -> packed as `weight_format` ("" keeps the weight's own).

    Raises ValueError for a format the weight cannot take.
    """
    if isinstance(weight, QuantizedTensor):
        weight_format = weight_format or weight.format
        if weight_format != weight.format or weight.format not in BLOCK_BYTES:
            raise ValueError(f"weights quantized as {weight.format} cannot be packed as {weight_format}")
        data, source, depth = weight.blocks.contiguous(), _FROM_BLOCKS, weight.in_features
        if data.shape[1] * _BLOCK != depth * BLOCK_BYTES[weight.format]:
            raise ValueError(f"{weight.format} rows of {data.shape[1]} bytes do not hold {depth} values")
    else:
        own = "float32" if weight.dtype is torch.float32 else "bfloat16"
        weight_format = weight_format or own
        if weight_format not in FORMATS or (weight_format in ("float32", "bfloat16") and weight_format != own):
            raise ValueError(f"{own} weights cannot be packed as {weight_format!r}; formats: {', '.join(FORMATS)}")
        data, source, depth = weight.contiguous(), DTYPES[weight.dtype], weight.shape[1]
    if weight_format in BLOCK_BYTES and depth % _BLOCK:
        raise ValueError(f"{weight_format} needs rows of a multiple of {_BLOCK} values, not {depth}")
    features = data.shape[0]
    size = library.functions.hr_packed_bytes(FORMATS[weight_format], features, depth)
    packed = arena.take(size)
    library.functions.hr_pack(
        FORMATS[weight_format], source, data.data_ptr(), features, depth, packed.data_ptr(), threads
    )
    wide = None if bias is None else bias.float().contiguous()
    return PackedLinear(packed, wide, depth, features, packed=True, format=weight_format)


class Arena:
    """Memory for packed weights in large pieces: a piece can lie on large pages, a single layer's weight hardly.

    Weights are views; a piece goes when its last weight does.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 [size], 64-byte aligned, uninitialized."""
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._free.numel() < padded:
            raw = torch.empty(max(padded, _PIECE) + _LARGE_PAGE, dtype=torch.uint8)
            self._free = raw[-raw.data_ptr() % _LARGE_PAGE :]
            # The whole piece, before any of it is written: a page that is only partly asked for stays a small one.
            self._library.functions.hr_advise_large_pages(self._free.data_ptr(), self._free.numel())
        taken, self._free = self._free[:size], self._free[padded:]
        return taken


def linear_struct(layer: PackedLinear) -> HrLinear:
    """The C view of a packed layer; `layer` must outlive it."""
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return HrLinear(layer.weight.data_ptr(), bias, layer.in_features, layer.out_features, FORMATS[layer.format])


def attention_struct(weights: AttentionWeights, norm: Tensor) -> HrAttention:
    """The C view of a block; `weights` and `norm` (float32) must outlive it. Raises ValueError for odd shapes."""
    rows = (weights.num_heads + 2 * weights.num_kv_heads) * weights.head_dim
    width = weights.num_heads * weights.head_dim
    _expect("qkv", (weights.qkv.in_features, weights.qkv.out_features), (norm.numel(), rows))
    _expect("output", (weights.output.in_features, weights.output.out_features), (width, norm.numel()))
    if weights.num_heads % weights.num_kv_heads:
        raise ValueError(f"{weights.num_heads} heads do not share {weights.num_kv_heads} KV heads evenly")
    return HrAttention(
        linear_struct(weights.qkv),
        linear_struct(weights.output),
        norm.data_ptr(),
        weights.num_heads,
        weights.num_kv_heads,
        weights.head_dim,
        weights.eps,
    )


def mlp_struct(weights: MlpWeights, norm: Tensor) -> HrMlp:
    """The C view of a block; `weights` and `norm` (float32) must outlive it. Raises ValueError for odd shapes."""
    width = weights.down.in_features
    _expect("gate_up", (weights.gate_up.in_features, weights.gate_up.out_features), (norm.numel(), 2 * width))
    _expect("down", (weights.down.in_features, weights.down.out_features), (width, norm.numel()))
    return HrMlp(linear_struct(weights.gate_up), linear_struct(weights.down), norm.data_ptr(), weights.eps)


def _expect(name: str, got: tuple[int, int], wanted: tuple[int, int]) -> None:
    if got != wanted:
        raise ValueError(f"{name} maps {got[0]} to {got[1]} features, expected {wanted[0]} to {wanted[1]}")


def pointer_array(structs: Sequence[ctypes.Structure]) -> ctypes.Array[ctypes.c_void_p]:
    """Addresses of structs, which must outlive it."""
    return (ctypes.c_void_p * len(structs))(*(ctypes.addressof(struct) for struct in structs))
