"""Every kernel test runs on every backend that this machine can run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.cpu.library import load
from kernels.cpu.native import NativeOps
from kernels.cpu.onednn import OneDnnOps
from kernels.interface import Ops
from kernels.reference import ReferenceOps


def _native() -> Ops:
    library = load()
    if isinstance(library, str):
        pytest.skip(library)
    return NativeOps(library)


BACKENDS: list[tuple[str, str, Callable[[], Ops]]] = [
    ("cpu", "reference", ReferenceOps),
    ("cpu", "onednn", OneDnnOps),
    ("cpu", "native", _native),
]
if torch.cuda.is_available():
    BACKENDS.append(("cuda", "reference", ReferenceOps))


@pytest.fixture(params=BACKENDS, ids=lambda backend: f"{backend[1]}-{backend[0]}")
def backend(request: pytest.FixtureRequest) -> tuple[Ops, str]:
    """(op table, device)"""
    device, _, ops = request.param
    return ops(), device
