"""Every GGUF format against the gguf library's own dequantisation, bit for bit in float32."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine_worker.errors import LoadError
from engine_worker.quant.dequantize import dequantize_into, row_bytes

OWN = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
FLOATS = [Kind.F32, Kind.F16, Kind.BF16]


def random_bytes(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Any bytes are a valid block; scales may come out as NaN or infinity."""
    return np.random.default_rng(int(kind)).integers(0, 256, (rows, row_bytes(kind, columns)), dtype=np.uint8)


@pytest.mark.parametrize("kind", OWN + K_QUANTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (5, 512), (700, 768)])
def test_equals_the_gguf_library(kind: Kind, rows: int, columns: int) -> None:
    raw = random_bytes(kind, rows, columns)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind)
        out = torch.full((rows, columns), 12345.0)
        dequantize_into(torch.from_numpy(raw), kind, out)
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("kind", [*OWN, *FLOATS], ids=lambda kind: kind.name)
def test_reads_what_the_gguf_library_wrote(kind: Kind) -> None:
    values = np.random.default_rng(1).standard_normal((6, 64), dtype=np.float32)
    raw = gguf.quantize(values, kind)
    out = torch.empty(6, 64)
    dequantize_into(torch.from_numpy(raw.view(np.uint8)), kind, out)
    np.testing.assert_array_equal(out.numpy(), gguf.dequantize(raw, kind))
    assert np.abs(out.numpy() - values).max() < 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once_to_the_destination_dtype(dtype: torch.dtype) -> None:
    raw = torch.from_numpy(
        gguf.quantize(np.random.default_rng(2).standard_normal((4, 64), dtype=np.float32), Kind.Q4_1)
    )
    wide, narrow = torch.empty(4, 64), torch.empty(4, 64, dtype=dtype)
    dequantize_into(raw, Kind.Q4_1, wide)
    dequantize_into(raw, Kind.Q4_1, narrow)
    assert torch.equal(narrow, wide.to(dtype))


def test_writes_into_a_strided_destination_and_nowhere_else() -> None:
    raw = torch.from_numpy(gguf.quantize(np.ones((4, 32), dtype=np.float32), Kind.Q8_0))
    buffer = torch.full((8, 40), float("nan"))
    dequantize_into(raw, Kind.Q8_0, buffer[2:6, 4:36])
    assert buffer[2:6, 4:36].allclose(torch.ones(4, 32), atol=1e-2)
    assert int(buffer.isnan().sum()) == 8 * 40 - 4 * 32


def test_refuses_rows_that_do_not_fill_blocks() -> None:
    with pytest.raises(LoadError, match=r"48 elements .* Q4_0 blocks of 32"):
        row_bytes(Kind.Q4_0, 48)


def test_refuses_data_of_another_size() -> None:
    with pytest.raises(LoadError, match="does not expand to 2 x 64"):
        dequantize_into(torch.zeros(2, 18, dtype=torch.uint8), Kind.Q4_0, torch.empty(2, 64))


def test_names_a_format_that_nobody_can_read() -> None:
    raw = torch.zeros(1, row_bytes(Kind.Q8_K, 256), dtype=torch.uint8)
    with pytest.raises(LoadError, match="Q8_K is not supported"):
        dequantize_into(raw, Kind.Q8_K, torch.empty(1, 256))
