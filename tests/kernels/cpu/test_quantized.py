"""Int8 and 4-bit linears: packing is exact (GGUF's own dequantization is the oracle), activations cost a stated error.

Stated error: against float64 over the dequantized weights, the largest difference stays below 2 % of the largest
output; that is the quantization of activations to 8 bits (or, for many rows, of weights to bfloat16).
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.native import NativeOps
from kernels.layout import QuantizedTensor
from tests.support.kernel_cases import random_tensor, relative_error

TYPES = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
STATED_ERROR = 2e-2
ROWS = [1, 2, 5, 23, 40, 150]


def _quantized(weight: Tensor, form: str) -> tuple[QuantizedTensor, Tensor]:
    """gguf's blocks of a float32 weight, and what they stand for."""
    blocks = gguf.quants.quantize(weight.numpy(), TYPES[form])
    exact = torch.from_numpy(gguf.quants.dequantize(blocks, TYPES[form]).astype(np.float32))
    return QuantizedTensor(torch.from_numpy(blocks), form, weight.shape[1]), exact


@pytest.mark.parametrize("form", sorted(TYPES))
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("features", "depth"), [(960, 576), (48, 1536), (17, 32), (50, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_blocks(native: NativeOps, form: str, rows: int, features: int, depth: int, dtype: torch.dtype) -> None:
    blocks, exact = _quantized(random_tensor((features, depth), torch.float32, 2, depth**-0.5), form)
    x = random_tensor((rows, depth), dtype, 1)
    got = native.logits(x, native.pack_linear(blocks))
    assert relative_error(got, F.linear(x.double(), exact.double())) < STATED_ERROR


@pytest.mark.parametrize("form", sorted(TYPES))
def test_packing_keeps_every_weight(native: NativeOps, form: str) -> None:
    """Unit vectors read the weights back; their quantization is exact, so only storage could lose anything."""
    blocks, exact = _quantized(random_tensor((33, 64), torch.float32, 2), form)
    layer = native.pack_linear(blocks)
    for column in range(64):
        unit = torch.zeros(1, 64)
        unit[0, column] = 1.0
        torch.testing.assert_close(native.linear(unit, layer)[0], exact[:, column], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["int8", *sorted(TYPES)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_at_load(native: NativeOps, form: str, dtype: torch.dtype) -> None:
    weight = random_tensor((96, 320), dtype, 2, 0.05)
    x = random_tensor((6, 320), dtype, 1)
    got = native.linear(x, native.pack_linear(weight, weight_format=form))
    bits = 4 if form.startswith("q4") else 8
    assert relative_error(got, F.linear(x.double(), weight.double())) < (0.12 if bits == 4 else STATED_ERROR)


def _rotate(x: Tensor) -> Tensor:
    """Float64: blocks of the padded depth times a Hadamard matrix, made by Sylvester's rule."""
    padded = -(-x.shape[1] // 64) * 64
    size = min(padded & -padded, 512)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    wide = F.pad(x.double(), (0, padded - x.shape[1]))
    return (wide.view(x.shape[0], -1, size) @ matrix * size**-0.5).view(x.shape[0], padded)


@pytest.mark.parametrize("form", sorted(TYPES))
def test_quantizing_at_load_agrees_with_gguf(native: NativeOps, form: str) -> None:
    weight = random_tensor((32, 256), torch.float32, 2, 0.05)
    x = random_tensor((3, 256), torch.float32, 1)
    ours = native.linear(x, native.pack_linear(weight, weight_format=form))
    theirs = native.linear(x, native.pack_linear(_quantized(weight, form)[0]))
    assert relative_error(ours, theirs) < 2e-2


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("features", "depth"), [(960, 576), (17, 40), (576, 1536)])
@pytest.mark.parametrize("biased", [False, True])
def test_int8_weights(native: NativeOps, rows: int, features: int, depth: int, biased: bool) -> None:
    weight = random_tensor((features, depth), torch.bfloat16, 2, depth**-0.5)
    bias = random_tensor((features,), torch.bfloat16, 3) if biased else None
    x = random_tensor((rows, depth), torch.bfloat16, 1)
    rotated = _rotate(weight)
    scale = rotated.abs().amax(1, keepdim=True) / 127
    got = native.logits(x, native.pack_linear(weight, bias, "int8"))
    wanted = F.linear(_rotate(x), (rotated / scale).round() * scale, None if bias is None else bias.double())
    assert relative_error(got, wanted) < STATED_ERROR


def test_int8_is_exact_where_rotated_activations_fit_the_grid(native: NativeOps) -> None:
    """Integers on both sides, rotated back: with blocks of 64 every step is exact; an error is the kernel's."""
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 2, 9, 70):
        x = torch.randint(-127, 128, (rows, 192), generator=generator).float()
        weight = torch.randint(-127, 128, (40, 192), generator=generator).float()
        x[:, 0], weight[:, 1] = 127.0, -127.0
        layer = native.pack_linear(_rotate(weight).float(), weight_format="int8")
        torch.testing.assert_close(native.linear(_rotate(x).float(), layer), F.linear(x, weight), rtol=1e-6, atol=1e-2)


def test_int8_keeps_small_activations_beside_a_huge_one(native: NativeOps) -> None:
    """What the rotation is for: 0.1 beside 20 is half a step of one scale a row, and would be lost."""
    x = torch.full((4, 64), 0.07)
    x[:, 5] = 20.0
    weight = random_tensor((32, 64), torch.float32, 2)
    weight[:, 5] = 0.0
    got = native.linear(x, native.pack_linear(weight, weight_format="int8"))
    assert relative_error(got, F.linear(x, weight)) < 0.15


@pytest.mark.parametrize("form", ["", "int8", *sorted(TYPES)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_from_every_format(native: NativeOps, form: str, dtype: torch.dtype) -> None:
    weight = random_tensor((50, 96), dtype, 2, 0.05)
    exact = weight.double()
    if form == "int8":
        rotated = _rotate(weight)
        scale = rotated.abs().amax(1, keepdim=True) / 127
        exact = _rotate((rotated / scale).round() * scale)[:, :96]
    table = native.pack_embedding(weight, form) if form in ("", "int8") else None
    if table is None:
        blocks, dequantized = _quantized(weight.float(), form)
        table, exact = native.pack_embedding(blocks), dequantized.double()
    ids = torch.tensor([49, 0, 17, 17, 3, 16, 31, 32, 48, 1, 2])
    got = native.embedding(table, ids, dtype)
    assert got.dtype is dtype
    assert relative_error(got, exact[ids]) < (1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("form", ["int8", *sorted(TYPES)])
@pytest.mark.parametrize("column", [0, 100, 191])
def test_a_bad_row_stays_bad_and_alone(native: NativeOps, form: str, rows: int, column: int) -> None:
    layer = native.pack_linear(random_tensor((64, 192), torch.bfloat16, 2), weight_format=form)
    x = random_tensor((rows, 192), torch.bfloat16, 1)
    wanted = native.logits(x, layer)
    x[1, column] = float("nan")
    got = native.logits(x, layer)
    assert got[1].isnan().all()
    keep = [row for row in range(rows) if row != 1]
    assert torch.equal(got[keep], wanted[keep])


def test_a_token_outside_the_table_is_refused(native: NativeOps) -> None:
    table = native.pack_embedding(random_tensor((50, 96), torch.bfloat16, 2))
    for bad in (50, -1):
        with pytest.raises(ValueError, match="between 0 and 49"):
            native.embedding(table, torch.tensor([3, bad]), torch.bfloat16)


def test_a_format_that_cannot_hold_the_weight_is_refused(native: NativeOps) -> None:
    with pytest.raises(ValueError, match="q4_0 needs rows of a multiple of 32 values, not 40"):
        native.pack_linear(random_tensor((8, 40), torch.bfloat16, 2), weight_format="q4_0")
    with pytest.raises(ValueError, match="cannot be packed as 'int3'"):
        native.pack_linear(random_tensor((8, 64), torch.bfloat16, 2), weight_format="int3")
    with pytest.raises(ValueError, match="q4_0 rows of 17 bytes do not hold 32 values"):
        native.pack_linear(QuantizedTensor(torch.zeros(4, 17, dtype=torch.uint8), "q4_0", 32))
