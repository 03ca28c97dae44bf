"""The one import for everything above the kernels: the nouns, the op table, and which backend serves a device.

`select_backend` is called once, at load; from then on a model only knows the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.build import must_compile
from kernels.cpu.expand import expand
from kernels.cpu.isa import native_wanted
from kernels.cpu.library import load
from kernels.cpu.native import NativeOps
from kernels.cpu.onednn import OneDnnOps
from kernels.draws import LEVELS, Draws, padded
from kernels.interface import Ops, Step
from kernels.layout import (
    BLOCK_BYTES,
    AttentionWeights,
    BatchLayout,
    KVCache,
    LayerCache,
    MlpWeights,
    ModelOutput,
    ModelWeights,
    PackedLinear,
    QuantizedTensor,
    RopeTable,
    kv_cache_bytes,
    new_kv_cache,
)
from kernels.populate import populate
from kernels.reference import ReferenceOps

__all__ = [
    "BLOCK_BYTES",
    "LEVELS",
    "AttentionWeights",
    "BatchLayout",
    "Draws",
    "KVCache",
    "LayerCache",
    "MlpWeights",
    "ModelOutput",
    "ModelWeights",
    "Ops",
    "PackedLinear",
    "QuantizedTensor",
    "RopeTable",
    "Step",
    "expand_blocks",
    "kv_cache_bytes",
    "new_kv_cache",
    "padded",
    "populate",
    "select_backend",
    "will_compile",
]


def select_backend(device: torch.device | str, *, batch_invariant: bool = False) -> Ops:
    """The fastest backend that runs on `device`.

    On CPUs HEADRACE_CPU_BACKEND chooses between "native" (the default), our own kernels, compiled at the first start,
    and "torch"; `Ops.note` says why torch serves where native cannot. Raises ValueError for any other value, and where
    results are to be `batch_invariant` and the native kernels, which alone can promise it, are not there.
    """
    on_cpu = torch.device(device).type == "cpu"
    library = load() if on_cpu and native_wanted() else ""
    if not isinstance(library, str):
        return NativeOps(library, batch_invariant=batch_invariant)
    if batch_invariant:
        why = library or ("HEADRACE_CPU_BACKEND is torch" if on_cpu else "the device is not a CPU")
        raise ValueError(f"batch_invariant needs the native CPU kernels, and they do not serve here: {why}")
    if not on_cpu:
        return ReferenceOps()
    ops = OneDnnOps() if torch._C._has_mkldnn else ReferenceOps()
    ops.note = library
    return ops


def expand_blocks(blocks: Tensor, kind: str, destination: Tensor) -> bool:
    """Whether the native kernels wrote the numbers of GGUF blocks to `destination`; False: nothing is written.

    blocks uint8 [rows, bytes of a row] of the GGUF type `kind`, destination [rows, columns] of as many numbers.
    """
    library = load() if native_wanted() else ""
    return not isinstance(library, str) and expand(library, blocks, kind, destination)


def will_compile(device: torch.device | str) -> bool:
    """Whether `select_backend` will take the seconds of compiling first. Raises ValueError as it does."""
    return torch.device(device).type == "cpu" and native_wanted() and must_compile()
