"""Which instruction sets this CPU has, the levels the native kernels are built for, and what the user chose of both.

A level is a name and compiler flags, which depend on nothing else: a library built for one runs on every CPU that has
what it requires. Levels are tried from the best down. HEADRACE_CPU_ISA forces one that the CPU has, for tests and
comparisons.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["LEVELS", "Level", "available_levels", "buildable_levels", "candidate_levels", "native_wanted"]

_CPUINFO = Path("/proc/cpuinfo")

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_BF16 = (*_AVX512, "avx512_bf16", "avx512vbmi", "avx512_vnni")
_FLAG_OF = {
    "avx512_bf16": "avx512bf16",
    "avx512_vnni": "avx512vnni",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
}
"""Where the compiler spells a feature differently from the kernel of the operating system."""


@dataclass(frozen=True, slots=True)
class Level:
    """One build of the kernels."""

    name: str
    required: tuple[str, ...]
    """CPU features (as Linux names them) without which it cannot run."""

    def flags(self) -> tuple[str, ...]:
        """Compiler flags."""
        return tuple(f"-m{_FLAG_OF.get(feature, feature)}" for feature in self.required)


LEVELS = (
    Level("amx", (*_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8")),
    Level("avx512", _AVX512_BF16),
    Level("avx512", (*_AVX512, "avx512_vnni")),
    Level("avx512", _AVX512),
    Level("avx2", _AVX2),
    Level("portable", ()),
)
"""Best first. Those of one name are what CPUs of several years have of it."""

_X86 = ("x86_64", "AMD64")


@cache
def _cpu_features() -> frozenset[str]:
    """Feature names of the first CPU; empty where the system does not list them (the portable level still runs)."""
    if platform.machine() not in _X86 or not _CPUINFO.exists():
        return frozenset()
    for line in _CPUINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def available_levels() -> tuple[Level, ...]:
    """Levels this CPU can run, best first, and of each name the best."""
    best: dict[str, Level] = {}
    for level in LEVELS:
        if _cpu_features().issuperset(level.required):
            best.setdefault(level.name, level)
    return tuple(best.values())


def buildable_levels() -> tuple[Level, ...]:
    """Levels that can be compiled here, though not every one runs on this CPU."""
    return LEVELS if platform.machine() in _X86 else tuple(level for level in LEVELS if not level.required)


def candidate_levels() -> tuple[Level, ...]:
    """What to try, best first; only the one HEADRACE_CPU_ISA names where it is set.

    Raises ValueError where it names one that does not exist or that this CPU cannot run.
    """
    levels = available_levels()
    name = os.environ.get("HEADRACE_CPU_ISA", "")
    if not name:
        return levels
    for level in levels:
        if level.name == name:
            return (level,)
    raise ValueError(f"HEADRACE_CPU_ISA is {name!r}; this CPU runs {', '.join(level.name for level in levels)}")


def native_wanted() -> bool:
    """Whether the native kernels shall serve on a CPU, as HEADRACE_CPU_BACKEND says. Raises ValueError where it says
    neither."""
    choice = os.environ.get("HEADRACE_CPU_BACKEND", "") or "native"
    if choice not in ("native", "torch"):
        raise ValueError(f"HEADRACE_CPU_BACKEND is {choice!r}; allowed: native, torch")
    return choice == "native"
