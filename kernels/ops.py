"""The one import for everything above the kernels: the nouns, the op table, and which backend serves a device.

`select_backend` is called once, at load; from then on a model only knows the table.
"""

from __future__ import annotations

import torch

from kernels.cpu.onednn import OneDnnOps
from kernels.interface import Ops, Step
from kernels.layout import (
    AttentionWeights,
    BatchLayout,
    KVCache,
    LayerCache,
    MlpWeights,
    PackedLinear,
    RopeTable,
    kv_cache_bytes,
    new_kv_cache,
)
from kernels.reference import ReferenceOps

__all__ = [
    "AttentionWeights",
    "BatchLayout",
    "KVCache",
    "LayerCache",
    "MlpWeights",
    "Ops",
    "PackedLinear",
    "RopeTable",
    "Step",
    "kv_cache_bytes",
    "new_kv_cache",
    "select_backend",
]


def select_backend(device: torch.device | str) -> Ops:
    """The fastest backend that runs on `device`."""
    if torch.device(device).type == "cpu" and torch._C._has_mkldnn:
        return OneDnnOps()
    return ReferenceOps()
