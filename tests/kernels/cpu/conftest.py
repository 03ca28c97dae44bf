"""Native backends, one per CPU level this machine can run, built into the user's cache like in production."""

from __future__ import annotations

from functools import cache

import pytest

from kernels.cpu.build import BuildError
from kernels.cpu.isa import available_levels
from kernels.cpu.library import Library
from kernels.cpu.native import NativeOps

_LEVELS = {level.name: level for level in available_levels()}


@cache
def _backend(name: str) -> NativeOps | str:
    try:
        return NativeOps(Library(_LEVELS[name]), threads=2)
    except BuildError as error:
        return str(error)


@pytest.fixture(params=sorted(_LEVELS))
def native(request: pytest.FixtureRequest) -> NativeOps:
    """The backend at every level in turn."""
    backend = _backend(request.param)
    if isinstance(backend, str):
        pytest.skip(backend)
    return backend
