"""GGUF's simple block formats -> plain numbers by the C++ kernels: many times as fast as with torch's operators."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, Library

__all__ = ["expand"]

_FORMS = {"Q4_0": (4, 0), "Q4_1": (4, 1), "Q5_0": (5, 0), "Q5_1": (5, 1), "Q8_0": (8, 0)}
"""Bits of a code, and whether a block has a minimum."""
_BLOCK = 32


def expand(library: Library, blocks: Tensor, kind: str, destination: Tensor) -> bool:
    """blocks uint8 [rows, bytes of a row] of the GGUF type `kind` -> destination [rows, columns], which has as many
    numbers.

    False, and nothing written, where these kernels do not do it: another type, device or layout.
    """
    hosted = destination.device.type == "cpu" and destination.is_contiguous() and blocks.is_contiguous()
    if kind not in _FORMS or not hosted or destination.dtype not in DTYPES:
        return False
    bits, minimum = _FORMS[kind]
    written = library.functions.hr_expand(
        bits,
        minimum,
        blocks.data_ptr(),
        destination.numel() // _BLOCK,
        DTYPES[destination.dtype],
        destination.data_ptr(),
        torch.get_num_threads(),
    )
    return bool(written)
