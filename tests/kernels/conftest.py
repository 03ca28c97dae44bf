"""Every kernel test runs on every backend that this machine can run."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.onednn import OneDnnOps
from kernels.interface import Ops
from kernels.reference import ReferenceOps

BACKENDS: list[tuple[str, type[Ops]]] = [("cpu", ReferenceOps), ("cpu", OneDnnOps)]
if torch.cuda.is_available():
    BACKENDS.append(("cuda", ReferenceOps))


@pytest.fixture(params=BACKENDS, ids=lambda backend: f"{backend[1].name}-{backend[0]}")
def backend(request: pytest.FixtureRequest) -> tuple[Ops, str]:
    """(op table, device)"""
    device, ops = request.param
    return ops(), device
