"""GGUF tensor data -> floating-point weights, written straight into their destination.

The formats of small models (Q4_0 … Q8_0) are expanded by the native kernels where those serve, and else by vectorised
torch here; K-quants and the rest by the gguf library's own code. Without the kernels, work goes through row chunks that
stay in the processor's cache, on one thread: no full float32 copy ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from torch import Tensor

from engine_worker.errors import LoadError
from kernels.ops import expand_blocks

__all__ = ["dequantize_into", "row_bytes"]

_CHUNK_ELEMENTS = 1 << 17
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F

_FLOAT_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


def row_bytes(kind: GGMLQuantizationType, columns: int) -> int:
    """Bytes of one row of `columns` elements. Raises LoadError where the format cannot hold such a row."""
    block, size = GGML_QUANT_SIZES[kind]
    if columns % block:
        raise LoadError(f"A row of {columns} elements does not fill whole {kind.name} blocks of {block}.")
    return int(columns // block * size)


def dequantize_into(raw: Tensor, kind: GGMLQuantizationType, destination: Tensor) -> None:
    """Expands raw uint8 [rows, row_bytes] into destination [rows, columns] (any float dtype, any device).

    Exact: every element is computed in float32 as the format defines it and rounded once to the destination's dtype.
    """
    rows, columns = destination.shape
    if tuple(raw.shape) != (rows, row_bytes(kind, columns)):
        raise LoadError(f"{kind.name} data of shape {tuple(raw.shape)} does not expand to {rows} x {columns}.")
    if kind in _FLOAT_TYPES:
        destination.copy_(raw.view(_FLOAT_TYPES[kind]))
        return
    if expand_blocks(raw, kind.name, destination):
        return
    step = max(1, _CHUNK_ELEMENTS // columns)
    with _one_thread():
        for start in range(0, rows, step):
            chunk = raw[start : start + step]
            destination[start : start + step].copy_(_expand(chunk, kind).view(chunk.shape[0], columns))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Waking torch's other threads for operations of some 50 us takes longer than they save: half of the whole time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _expand(raw: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Contiguous uint8 rows -> float32, any shape with the same order of elements."""
    expand = _EXPANDERS.get(kind)
    if expand is not None:
        return expand(raw.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    try:
        return torch.from_numpy(np.ascontiguousarray(gguf_dequantize(raw.numpy(), kind)))
    except NotImplementedError as error:
        message = f"The tensor format {kind.name} is not supported. Use a Q4_0 … Q8_0 or K-quant file."
        raise LoadError(message) from error


# Each takes blocks uint8 [N, block bytes] of 32 elements and returns float32 [N, 32]. Nibbles: element i of the first
# half is the low one of byte i, of the second half the high one. `d` is the block's scale, `m` its minimum, both
# float16.


def _half(blocks: Tensor, offset: int) -> Tensor:
    return blocks[:, offset : offset + 2].view(torch.float16).float()


def _nibbles(quants: Tensor) -> Tensor:
    """uint8 [N, 16] -> float32 [N, 32], eight bytes at a time: bits that a shift moves to the next byte are masked."""
    words = quants.contiguous().view(torch.int64)
    out = torch.empty(quants.shape[0], 4, dtype=torch.int64)
    torch.bitwise_and(words, _LOW_NIBBLES, out=out[:, :2])
    torch.bitwise_and(words >> 4, _LOW_NIBBLES, out=out[:, 2:])
    return out.view(torch.uint8).float()


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [N, 4], bit i (little endian) belongs to element i -> 16.0 or 0.0, float32 [N, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).view(-1, 32).float().mul_(16)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 6:]).add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 8:]).add_(_fifth_bits(blocks[:, 4:8]))
    return quants.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


_EXPANDERS: dict[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}
