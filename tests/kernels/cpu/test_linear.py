"""Plain linears, norms and the gate against float64 or torch, for odd shapes and every CPU level."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu.native import NativeOps
from kernels.reference import ReferenceOps
from tests.support.kernel_cases import random_tensor, relative_error

SHAPES = [(1, 576, 960), (3, 32, 64), (7, 100, 50), (8, 576, 576), (17, 64, 17), (33, 1536, 576), (70, 8, 16)]
SHAPES += [(300, 192, 128), (5, 1, 1), (1, 2048, 48)]


@pytest.mark.parametrize(("rows", "depth", "features"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_matches_float64(
    native: NativeOps, rows: int, depth: int, features: int, dtype: torch.dtype, biased: bool
) -> None:
    x = random_tensor((rows, depth), dtype, 1)
    weight = random_tensor((features, depth), dtype, 2, depth**-0.5)
    bias = random_tensor((features,), dtype, 3) if biased else None
    got = native.linear(x, native.pack_linear(weight, bias))
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype is dtype
    assert relative_error(got, wanted) < (1e-6 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_logits_are_float32_without_a_rounding_to_bfloat16(native: NativeOps, rows: int) -> None:
    hidden = random_tensor((rows, 576), torch.bfloat16, 1)
    weight = random_tensor((1000, 576), torch.bfloat16, 2, 0.04)
    got = native.logits(hidden, native.pack_linear(weight))
    assert got.dtype is torch.float32
    assert relative_error(got, F.linear(hidden.double(), weight.double())) < 2e-6


def test_a_row_does_not_depend_on_the_rest_of_the_batch(native: NativeOps) -> None:
    """Bit for bit from 3 rows up; one or two rows may take a kernel that adds up in another order."""
    layer = native.pack_linear(random_tensor((200, 576), torch.bfloat16, 2, 0.04))
    x = random_tensor((130, 576), torch.bfloat16, 1)
    together = native.logits(x, layer)
    for rows in (3, 7, 16, 40):
        assert torch.equal(native.logits(x[:rows].clone(), layer), together[:rows])
    for rows in (1, 2):
        assert relative_error(native.logits(x[:rows].clone(), layer), together[:rows]) < 2e-6


def test_one_bad_row_leaves_the_others_alone(native: NativeOps) -> None:
    layer = native.pack_linear(random_tensor((64, 100), torch.bfloat16, 2))
    x = random_tensor((6, 100), torch.bfloat16, 1)
    wanted = native.linear(x, layer)
    x[2] = float("nan")
    got = native.linear(x, layer)
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(got[keep], wanted[keep])
    assert got[2].isnan().all()
    # Scratch memory still holds the bad row: another call must not see it.
    assert torch.equal(native.linear(x[3:].clone(), layer), wanted[3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 48), (40, 2048), (3, 20)])
def test_norms_match_the_reference(native: NativeOps, dtype: torch.dtype, rows: int, width: int) -> None:
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    weight = random_tensor((width,), dtype, 3)
    x, residual = random_tensor((rows, width), dtype, 1), random_tensor((rows, width), torch.float32, 2)
    reference = ReferenceOps()
    assert relative_error(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < tolerance
    wanted, stream = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got, got_stream = native.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(got_stream, stream)
    assert relative_error(got, wanted) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul_matches_the_reference(native: NativeOps, dtype: torch.dtype) -> None:
    gate_up = random_tensor((9, 2 * 48), dtype, 1, 20.0)
    wanted = ReferenceOps().silu_and_mul(gate_up)
    assert relative_error(native.silu_and_mul(gate_up), wanted) < (1e-6 if dtype is torch.float32 else 1e-2)


def test_other_types_run_on_the_reference(native: NativeOps) -> None:
    x, weight = random_tensor((3, 32), torch.float16, 1), random_tensor((8, 32), torch.float16, 2)
    layer = native.pack_linear(weight)
    assert not layer.packed
    assert torch.equal(native.linear(x, layer), F.linear(x, weight))


def test_a_wrong_shape_is_refused_before_it_reaches_a_kernel(native: NativeOps) -> None:
    layer = native.pack_linear(random_tensor((8, 32), torch.float32, 2))
    with pytest.raises(ValueError, match="expected a contiguous"):
        native.linear(random_tensor((3, 2, 32), torch.float32, 1), layer)
    with pytest.raises(ValueError, match="cannot be packed"):
        native.pack_linear(random_tensor((8, 32), torch.float32, 2), weight_format="bfloat16")
