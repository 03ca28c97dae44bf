"""Attention weights of prompts in bfloat16, which are made from integers and a table: each weight by itself, rows of
every kind of score, and what is not a number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu.native import NativeOps
from kernels.layout import KVCache, new_kv_cache
from tests.kernels.oracles import attend
from tests.support.kernel_cases import relative_error, rope_table
from tests.support.paged import Row, make_layout

BLOCK = 16


def _prompt(native: NativeOps, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query [Q, heads, D] at the last Q of the positions of keys and values [L, kv_heads, D] -> [Q, heads, D]."""
    length, kv_heads, dim = keys.shape
    count = query.shape[0]
    blocks = range(-(-length // BLOCK))
    cache: KVCache = new_kv_cache(1, len(blocks), BLOCK, kv_heads, dim, torch.bfloat16, "cpu")
    cache.layers[0].key.flatten(0, 1)[:length] = keys
    cache.layers[0].value.flatten(0, 1)[:length] = values
    layout = make_layout([Row(length - count, count, blocks)], BLOCK)
    return native.begin(layout, cache, rope_table(dim, length)).attention(query, 0).view(query.shape)


def _random(count: int, length: int, *, heads: int = 3, kv_heads: int = 1, dim: int = 64) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    shapes = ((count, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim))
    return tuple(torch.randn(shape).bfloat16() for shape in shapes)


@pytest.mark.parametrize("dim", [64, 128])
def test_every_weight_is_as_exact_as_bfloat16_allows(native: NativeOps, dim: int) -> None:
    # Values are unit vectors, so a result's features are the weights of 64 keys. Keys lie on a line, queries along it.
    count = 96
    values = torch.eye(dim)[:64].repeat(3, 1).unsqueeze(1)
    values[64:] = 0.0
    keys = torch.zeros(192, 1, dim)
    keys[:, 0, 0] = torch.linspace(-1.0, 1.0, 192)
    query = torch.zeros(count, 1, dim)
    query[:, 0, 0] = torch.linspace(0.1, 100.0, count) * math.sqrt(dim) / 8
    query, keys, values = query.bfloat16(), keys.bfloat16(), values.bfloat16()
    got = _prompt(native, query, keys, values).double()
    wanted = attend(query, keys, values, list(range(192 - count, 192)))
    weighed = wanted > 1e-30
    assert weighed.sum() > 64 * count // 2
    # 0.27 % from powers in steps of 1 / 128, 0.39 % from rounding the weight, as much from rounding the result.
    error = (got[weighed] - wanted[weighed]).abs() / wanted[weighed]
    assert error.max() < 0.0106
    # Steps are neither up nor down: rows of many keys are better than any single one.
    assert error.mean() < 0.004


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.3, 1.0, 4.0, 1e3, 1e6])
def test_rows_of_equal_mixed_and_dominating_scores(native: NativeOps, scale: float) -> None:
    query, keys, values = _random(40, 1300)
    query = query * scale
    got = _prompt(native, query, keys, values)
    wanted = attend(query, keys, values, list(range(1260, 1300)))
    assert relative_error(got, wanted) < 1e-2


@pytest.mark.parametrize("rising", [1.0, -1.0])
def test_scores_that_rise_and_fall_along_a_row(native: NativeOps, rising: float) -> None:
    # The reference moves again and again, or once and for all.
    query, keys, values = _random(30, 700)
    query[..., 0] = 8.0
    keys[:, 0, 0] = (torch.linspace(-60.0, 60.0, 700) * rising).bfloat16()
    got = _prompt(native, query, keys, values)
    assert relative_error(got, attend(query, keys, values, list(range(670, 700)))) < 1e-2


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(native: NativeOps, seed: int) -> None:
    count, before = 2 + 37 * seed, 61 * seed * seed
    heads, dim = 1 + seed, (64, 64, 128, 32, 80, 64)[seed]
    query, keys, values = _random(count, before + count, heads=heads, dim=dim)
    got = _prompt(native, query, keys, values)
    assert relative_error(got, attend(query, keys, values, list(range(before, before + count)))) < 1e-2


def _poison_query(query: Tensor, keys: Tensor, bad: float) -> Tensor:
    query[7, 1, 5] = bad
    lost = torch.zeros(query.shape[:2], dtype=torch.bool)
    lost[7, 1] = True
    return lost


def _poison_key(query: Tensor, keys: Tensor, bad: float) -> Tensor:
    at = keys.shape[0] - query.shape[0] + 20
    keys[at, 0, 5] = bad
    lost = torch.zeros(query.shape[:2], dtype=torch.bool)
    lost[20:] = True
    return lost


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("poison", [_poison_query, _poison_key])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_no_number_stays_in_its_rows(
    native: NativeOps, poison: Callable[[Tensor, Tensor, float], Tensor], bad: float, dim: int
) -> None:
    # More keys than a segment, rows in two blocks; the lost rows share vectors with sound ones. Positive features turn
    # an infinite key into infinite scores.
    query, keys, values = _random(70, 400, dim=dim)
    query[..., 5] = query[..., 5].abs() + 1.0
    clean = _prompt(native, query, keys, values)
    lost = poison(query, keys, bad)
    got = _prompt(native, query, keys, values)
    assert got[lost].isnan().all()
    assert torch.equal(got[~lost], clean[~lost])
