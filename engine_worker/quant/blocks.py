"""GGUF tensor data -> blocks as the kernels keep them: the file's own, or rewritten without going through floats.

A Q4_0 block fits any wider one exactly. A Q4_K super-block of 256 holds 8 groups of 32 with 6-bit scales and minima;
their products with the block's two float16 factors become the float16 scale and minimum of a Q4_1 block each. Codes
stay as they are. That rounds scale and minimum by at most 2^-11 of themselves (about 1 % of a step between two codes);
4.5 bits a weight become 5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine_worker.errors import LoadError
from kernels.ops import BLOCK_BYTES

__all__ = ["BLOCK_FORMATS", "blocks_into", "can_rewrite"]

BLOCK_FORMATS = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0", "Q4_K": "q4_1"}
"""GGUF types that stay blocks, and the narrowest format that holds them."""

_CHUNK_BLOCKS = 1 << 12


def can_rewrite(kind: str, form: str) -> bool:
    """Whether `blocks_into` makes `form` of a GGUF type."""
    return BLOCK_FORMATS.get(kind) == form or (kind, form) in _REWRITES


def blocks_into(raw: Tensor, kind: GGMLQuantizationType, destination: Tensor) -> None:
    """raw uint8 [rows, bytes of a row] of type `kind` -> destination uint8 [rows, bytes of a row in another format].

    The format is known by its size. Raises LoadError where none of that size can be made.
    """
    own, size = GGML_QUANT_SIZES[kind]
    per_row = raw.shape[1] // size * (own // 32)
    form = _FORM_OF.get(destination.shape[1] // max(1, per_row))
    exact = form is not None and destination.shape == (raw.shape[0], per_row * BLOCK_BYTES[form])
    if form is None or not exact or not can_rewrite(kind.name, form):
        raise LoadError(f"{kind.name} data of shape {tuple(raw.shape)} does not fill {tuple(destination.shape)}.")
    rewrite = _REWRITES.get((kind.name, form))
    if rewrite is None:
        destination.copy_(raw)
        return
    rows = max(1, _CHUNK_BLOCKS * size // raw.shape[1])
    for start in range(0, raw.shape[0], rows):
        chunk = raw[start : start + rows]
        destination[start : start + rows].copy_(rewrite(chunk.reshape(-1, size)).view(chunk.shape[0], -1))


def _q4_0_as_q4_1(blocks: Tensor) -> Tensor:
    """uint8 [N, 18] -> uint8 [N, 20]: the minimum is -8 scales, which float16 holds exactly."""
    minima = (blocks[:, :2].view(torch.float16).float() * -8).half().view(torch.uint8)
    return torch.cat((blocks[:, :2], minima, blocks[:, 2:]), dim=1)


def _q4_0_as_q8_0(blocks: Tensor) -> Tensor:
    """uint8 [N, 18] -> uint8 [N, 34]."""
    codes = torch.cat((blocks[:, 2:] & 0x0F, blocks[:, 2:] >> 4), dim=1).view(torch.int8) - 8
    return torch.cat((blocks[:, :2], codes.view(torch.uint8)), dim=1)


def _q4_k_as_q4_1(blocks: Tensor) -> Tensor:
    """uint8 [N, 144] -> uint8 [N, 8 * 20]."""
    factors = blocks[:, :4].view(torch.float16).float()
    scales, minima = _six_bits(blocks[:, 4:16])
    # Bytes 32 j … 32 j + 31 hold group 2 j in their low nibbles and group 2 j + 1 in the high ones.
    quads = blocks[:, 16:].view(-1, 4, 1, 32)
    codes = torch.cat((quads & 0x0F, quads >> 4), dim=2).view(-1, 8, 2, 16)
    out = torch.empty(blocks.shape[0], 8, 20, dtype=torch.uint8)
    out[:, :, 0:2] = (factors[:, :1] * scales).half().unsqueeze(-1).view(torch.uint8)
    out[:, :, 2:4] = (factors[:, 1:] * minima).neg().half().unsqueeze(-1).view(torch.uint8)
    out[:, :, 4:] = codes[:, :, 0] | (codes[:, :, 1] << 4)
    return out.view(-1, 160)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [N, 12] -> scales and minima, float32 [N, 8] each. The first four of both lie in the low six bits of a
    byte; of the last four, four bits lie in the last bytes and two above the first ones."""
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (rest & 0x0F) | (low >> 6 << 4)), dim=1)
    minima = torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), dim=1)
    return scales.float(), minima.float()


_FORM_OF = {size: form for form, size in BLOCK_BYTES.items()}
_REWRITES: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("Q4_0", "q4_1"): _q4_0_as_q4_1,
    ("Q4_0", "q8_0"): _q4_0_as_q8_0,
    ("Q4_K", "q4_1"): _q4_k_as_q4_1,
}
