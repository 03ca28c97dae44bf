"""The compiled kernels as Python sees them: ctypes mirrors of src/types.h and the typed functions of src/api.cpp.

`load` finds, builds and opens the library once a process; it returns the reason as text where there is none.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from kernels.cpu.build import BuildError, build
from kernels.cpu.isa import Level, candidate_levels

__all__ = ["DTYPES", "STORAGE", "HrAttention", "HrLinear", "HrMlp", "HrModel", "HrStep", "HrTokens", "Library", "load"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Activation types the kernels know, with their code."""
STORAGE = {**DTYPES, torch.int8: 2}
"""Types of cache pages, with their code."""


class HrLinear(Structure):
    """A packed linear layer."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("format", c_int64),
    ]


class HrAttention(Structure):
    """The weights of an attention block."""

    _fields_ = [
        ("qkv", HrLinear),
        ("output", HrLinear),
        ("norm", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_double),
    ]


class HrMlp(Structure):
    """The weights of an MLP block."""

    _fields_ = [("gate_up", HrLinear), ("down", HrLinear), ("norm", c_void_p), ("eps", c_double)]


class HrModel(Structure):
    """A whole model."""

    _fields_ = [
        ("embedding", HrLinear),
        ("head", HrLinear),
        ("attention", POINTER(c_void_p)),
        ("mlp", POINTER(c_void_p)),
        ("norm", c_void_p),
        ("layers", c_int64),
        ("eps", c_double),
    ]


class HrTokens(Structure):
    """What a forward pass reads and writes besides the cache."""

    _fields_ = [
        ("ids", c_void_p),
        ("sample_at", c_void_p),
        ("sampled", c_int64),
        ("hidden", c_void_p),
        ("logits", c_void_p),
        ("lines", c_void_p),
        ("peaks", c_void_p),
        ("best", c_void_p),
    ]


class HrStep(Structure):
    """One step's batch, cache and rotary table."""

    _fields_ = [
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("table_width", c_int64),
        ("block_size", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_half", c_int64),
        ("dtype", c_int64),
        ("cache_dtype", c_int64),
        ("serial", c_int64),
    ]


_STEP, _ATTENTION, _MLP, _LINEAR = POINTER(HrStep), POINTER(HrAttention), POINTER(HrMlp), POINTER(HrLinear)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hr_enable": (c_int32, []),
    "hr_workspace_new": (c_void_p, [c_int64] * 2),
    "hr_workspace_free": (None, [c_void_p]),
    "hr_packed_bytes": (c_int64, [c_int64] * 3),
    "hr_advise_large_pages": (None, [c_void_p, c_int64]),
    "hr_pack": (None, [c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64]),
    "hr_expand": (c_int32, [c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64]),
    "hr_draw": (None, [c_void_p, c_int64, c_int64] + [c_void_p] * 8 + [c_int64]),
    "hr_linear": (None, [c_void_p, _LINEAR, c_int64, c_int64, c_void_p, c_void_p, c_int64]),
    "hr_rows": (None, [c_void_p, _LINEAR, c_int64, c_int64, c_void_p, c_void_p]),
    "hr_attention_block": (None, [c_void_p, _STEP, _ATTENTION, c_int64, c_void_p, c_void_p, c_void_p]),
    "hr_mlp_block": (None, [c_void_p, _MLP, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
    "hr_forward": (c_int32, [c_void_p, _STEP, POINTER(HrModel), POINTER(HrTokens)]),
    "hr_rotate_and_cache": (None, [c_void_p, _STEP, c_int64, c_int64, c_void_p, c_void_p]),
    "hr_attention": (None, [c_void_p, _STEP, c_int64, c_int64, c_void_p, c_void_p]),
    "hr_rms_norm": (None, [c_void_p] + [c_int64] * 3 + [c_void_p] * 3 + [c_double, c_void_p]),
    "hr_silu_mul": (None, [c_void_p] + [c_int64] * 3 + [c_void_p] * 2),
}


class _RefusedError(BuildError):
    """The system withholds a feature the CPU has; a lower level may do."""


class Library:
    """An opened library; `library.functions.hr_…` have the types above. Calls release the GIL."""

    def __init__(self, level: Level) -> None:
        """Raises BuildError where it cannot be built, opened, or used on this system."""
        path = build(level)
        self.level = level.name
        try:
            self.functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"the compiled kernels cannot be loaded: {error}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments
        if self.functions.hr_enable() != 0:
            raise _RefusedError("the system does not grant AMX tile state")


@cache
def load() -> Library | str:
    """The library for this CPU, or why there is none. Raises ValueError for a bad HEADRACE_CPU_ISA."""
    reason = ""
    for level in candidate_levels():
        try:
            return Library(level)
        except _RefusedError as error:
            reason = str(error)
        except BuildError as error:
            return str(error)
    return reason
