"""GGUF tensor data -> blocks as the kernels keep them: the file's own, or Q4_K rewritten as Q4_1.

A Q4_K super-block of 256 holds 8 groups of 32 with 6-bit scales and minima; their products with the block's two
float16 factors become the float16 scale and minimum of a Q4_1 block each. Codes stay as they are. That rounds scale and
minimum by at most 2^-11 of themselves (under 1 % of a step between two codes); 4.5 bits a weight become 5.
"""

from __future__ import annotations

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine_worker.errors import LoadError

__all__ = ["BLOCK_FORMATS", "blocks_into"]

BLOCK_FORMATS = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0", "Q4_K": "q4_1"}
"""GGUF types that become blocks without going through floats, and of which format."""

_CHUNK_BLOCKS = 1 << 12
_SUPER_BLOCK = 256


def blocks_into(raw: Tensor, kind: GGMLQuantizationType, destination: Tensor) -> None:
    """raw uint8 [rows, bytes of a row], of a type in BLOCK_FORMATS -> destination uint8 [rows, bytes of its blocks].

    Raises LoadError where the sizes do not belong together.
    """
    blocks = raw.shape[1] // GGML_QUANT_SIZES[kind][1] * (GGML_QUANT_SIZES[kind][0] // 32)
    wanted = GGMLQuantizationType[BLOCK_FORMATS[kind.name].upper()]
    if tuple(destination.shape) != (raw.shape[0], blocks * GGML_QUANT_SIZES[wanted][1]):
        raise LoadError(f"{kind.name} data of shape {tuple(raw.shape)} does not fill {tuple(destination.shape)}.")
    if kind is not GGMLQuantizationType.Q4_K:
        destination.copy_(raw)
        return
    rows = max(1, _CHUNK_BLOCKS * GGML_QUANT_SIZES[kind][1] // raw.shape[1])
    for start in range(0, raw.shape[0], rows):
        chunk = raw[start : start + rows]
        converted = _q4_k_as_q4_1(chunk.reshape(-1, GGML_QUANT_SIZES[kind][1]))
        destination[start : start + rows].copy_(converted.view(chunk.shape[0], -1))


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
