"""GGUF blocks expanded by the native kernels, against the gguf library's own dequantization, at every CPU level."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kernels.cpu.expand import expand
from kernels.cpu.native import NativeOps

KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def _blocks(kind: Kind, rows: int, columns: int) -> torch.Tensor:
    """Scales of every size, the smallest halves among them."""
    values = np.random.default_rng(int(kind)).standard_normal((rows, columns), dtype=np.float32)
    values *= np.geomspace(1e-6, 1e3, rows, dtype=np.float32)[:, None]
    return torch.from_numpy(gguf.quantize(values, kind))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 96), (70, 768)])
def test_every_number_is_the_gguf_librarys(native: NativeOps, kind: Kind, rows: int, columns: int) -> None:
    blocks = _blocks(kind, rows, columns)
    exact = torch.from_numpy(gguf.dequantize(blocks.numpy(), kind))
    for dtype in (torch.float32, torch.bfloat16):
        got = torch.full((rows + 1, columns), 12345.0, dtype=dtype)
        assert expand(native._library, blocks, kind.name, got[:rows])
        assert torch.equal(got[:rows], exact.to(dtype))
        assert bool((got[rows] == torch.tensor(12345.0).to(dtype)).all()), "past the end"


@pytest.mark.parametrize(
    ("kind", "destination"),
    [
        ("Q4_K", torch.zeros(2, 64)),
        ("Q4_0", torch.zeros(2, 64, dtype=torch.float16)),
        ("Q4_0", torch.zeros(2, 128)[:, :64]),
    ],
    ids=["format", "type", "strides"],
)
def test_what_they_do_not_do_is_left_as_it_was(native: NativeOps, kind: str, destination: torch.Tensor) -> None:
    assert not expand(native._library, torch.full((2, 36), 255, dtype=torch.uint8), kind, destination)
    assert not destination.any()
