"""Blocks as the kernels keep them, against the gguf library's own dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine_worker.errors import LoadError
from engine_worker.quant.blocks import BLOCK_FORMATS, blocks_into
from engine_worker.quant.dequantize import row_bytes

ROWS, COLUMNS = 37, 512


def random_q4_k(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Super-blocks of any codes, scales and minima; factors from tiny to large, of either sign."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // 256, 144), dtype=np.uint8)
    factors = rng.normal(size=(len(blocks), 2)) * 10.0 ** rng.uniform(-4, 0, (len(blocks), 2))
    blocks[:, :4] = factors.astype(np.float16).view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))


def expanded(blocks: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return np.asarray(gguf.dequantize(blocks.numpy(), kind), dtype=np.float64)


@pytest.mark.parametrize("seed", range(3))
def test_q4_k_becomes_q4_1_within_the_rounding_of_its_scales(seed: int) -> None:
    raw = random_q4_k(ROWS, COLUMNS, seed)
    destination = torch.full((ROWS, COLUMNS // 32 * 20), 255, dtype=torch.uint8)
    blocks_into(raw, gguf.GGMLQuantizationType.Q4_K, destination)
    got = expanded(destination, gguf.GGMLQuantizationType.Q4_1)
    wanted = expanded(raw, gguf.GGMLQuantizationType.Q4_K)
    # Of each group: 15 scales and the minimum, each off by half a unit in the last of float16's 11 bits.
    groups = wanted.reshape(-1, 32)
    bound = 2.0**-11 * (np.ptp(groups, axis=1) * 15 + np.abs(groups).max(axis=1) * 2) + 2.0**-20
    assert (np.abs(got - wanted).reshape(-1, 32) <= bound[:, None]).all()
    assert np.abs(got - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_q4_k_is_exact_where_products_fit_float16() -> None:
    """Factors that are powers of two times 6-bit numbers lose nothing: so codes, order and signs are right."""
    raw = random_q4_k(ROWS, COLUMNS, 5)
    powers = np.full((ROWS * COLUMNS // 256, 2), [2.0**-7, 2.0**-6], dtype=np.float16)
    raw.view(-1, 144)[:, :4] = torch.from_numpy(powers.view(np.uint8))
    destination = torch.empty((ROWS, COLUMNS // 32 * 20), dtype=torch.uint8)
    blocks_into(raw, gguf.GGMLQuantizationType.Q4_K, destination)
    got = expanded(destination, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(got, expanded(raw, gguf.GGMLQuantizationType.Q4_K))


@pytest.mark.parametrize("name", sorted(set(BLOCK_FORMATS) - {"Q4_K"}))
def test_other_blocks_are_the_files_own(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = torch.randint(0, 256, (5, row_bytes(kind, 96)), dtype=torch.uint8)
    destination = torch.zeros_like(raw)
    blocks_into(raw, kind, destination)
    assert torch.equal(destination, raw)


@pytest.mark.parametrize("form", ["q4_1", "q8_0"])
def test_q4_0_fits_wider_blocks_exactly(form: str) -> None:
    weight = np.random.default_rng(3).normal(size=(ROWS, 96)).astype(np.float32)
    raw = torch.from_numpy(gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_0))
    kind = gguf.GGMLQuantizationType[form.upper()]
    destination = torch.empty((ROWS, row_bytes(kind, 96)), dtype=torch.uint8)
    blocks_into(raw, gguf.GGMLQuantizationType.Q4_0, destination)
    np.testing.assert_array_equal(expanded(destination, kind), expanded(raw, gguf.GGMLQuantizationType.Q4_0))


def test_a_destination_of_another_size_is_refused() -> None:
    raw = random_q4_k(2, 256, 0)
    with pytest.raises(LoadError, match="does not fill"):
        blocks_into(raw, gguf.GGMLQuantizationType.Q4_K, torch.empty((2, 8 * 18), dtype=torch.uint8))
