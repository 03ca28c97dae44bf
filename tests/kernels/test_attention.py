"""Paged attention against a loop in float64: random batches, block edges, and a cache full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from kernels.interface import Ops
from kernels.ops import KVCache, RopeTable, new_kv_cache
from tests.kernels.oracles import attend
from tests.support.paged import Row, make_layout, poison

BLOCK = 4


class Case:
    """Rows of (tokens in cache before the step, new tokens) in a poisoned cache, with every valid slot filled at
    random."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        needed = [-(-(start + count) // BLOCK) for start, count in rows]
        blocks = list(range(sum(needed) + 3))
        rng.shuffle(blocks)
        self.cache: KVCache = new_kv_cache(2, len(blocks), BLOCK, kv_heads, dim, dtype, device)
        poison(self.cache)
        self.rows = [
            Row(start, count, [blocks.pop() for _ in range(n)]) for (start, count), n in zip(rows, needed, strict=True)
        ]
        self.layout = make_layout(self.rows, BLOCK, device)
        self.keys, self.values = [], []
        layer = self.cache.layers[1]
        for row in self.rows:
            length = row.start + row.count
            keys, values = (torch.randn(length, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
            for position in range(length):
                block, offset = row.blocks[position // BLOCK], position % BLOCK
                layer.key[block, offset] = keys[position]
                layer.value[block, offset] = values[position]
            self.keys.append(keys)
            self.values.append(values)
        self.query = torch.randn(self.layout.num_tokens, heads, dim, dtype=dtype, device=device)
        empty = torch.ones(1024, dim // 2, device=device)
        self.rope = RopeTable(empty, empty)

    def run(self, ops: Ops) -> torch.Tensor:
        with torch.inference_mode():
            return ops.begin(self.layout, self.cache, self.rope).attention(self.query, 1)

    def expected(self) -> torch.Tensor:
        out, token = [], 0
        for row, keys, values in zip(self.rows, self.keys, self.values, strict=True):
            query = self.query[token : token + row.count]
            positions = list(range(row.start, row.start + row.count))
            out.append(attend(query.cpu(), keys.cpu(), values.cpu(), positions))
            token += row.count
        return torch.cat(out).flatten(1)


BATCHES = {
    "one token": [(0, 1)],
    "one decode": [(7, 1)],
    "whole prompts": [(0, 3), (0, 1), (0, 9)],
    "decodes of every length round a block edge": [(n, 1) for n in range(2 * BLOCK + 2)],
    "decodes far apart in length": [(1, 1), (700, 1), (300, 1), (0, 1)],
    "chunks that continue": [(5, 3), (BLOCK, BLOCK), (BLOCK - 1, 2), (1, 2)],
    "chunks on block edges": [(0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, 2 * BLOCK)],
    "mixed order": [(9, 1), (0, 5), (3, 1), (6, 4), (0, 1), (20, 1)],
}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_kv_12_attention_over_a_nan_filled_pool_equals_the_oracle(
    backend: tuple[Ops, str], rows: list[tuple[int, int]]
) -> None:
    ops, device = backend
    case = Case(rows, device=device)
    out = case.run(ops).cpu()
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (7, 1), (9, 3), (14, 2)])
def test_query_heads_share_kv_heads_in_order(backend: tuple[Ops, str], heads: int, kv_heads: int) -> None:
    ops, device = backend
    case = Case([(0, 5), (6, 1), (6, 3), (2, 1)], heads=heads, kv_heads=kv_heads, device=device)
    torch.testing.assert_close(case.run(ops).cpu().double(), case.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(backend: tuple[Ops, str], seed: int) -> None:
    ops, device = backend
    rng = random.Random(seed)
    count = rng.randrange(1, 10)
    rows = [(rng.choice([0, rng.randrange(40)]), rng.choice([1, 1, rng.randrange(1, 14)])) for _ in range(count)]
    dim = rng.choice([2, 8, 20, 64])
    case = Case(rows, dim=dim, heads=6, kv_heads=rng.choice([1, 2, 3, 6]), device=device, seed=seed)
    torch.testing.assert_close(case.run(ops).cpu().double(), case.expected(), rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_close(backend: tuple[Ops, str]) -> None:
    ops, device = backend
    case = Case(BATCHES["mixed order"], dtype=torch.bfloat16, device=device)
    torch.testing.assert_close(case.run(ops).cpu().double(), case.expected(), rtol=2e-2, atol=2e-2)


def test_a_row_does_not_depend_on_its_neighbours(backend: tuple[Ops, str]) -> None:
    ops, device = backend
    case = Case([(9, 1), (0, 5), (300, 1)], device=device)
    together = case.run(ops)
    alone = ops.begin(make_layout(case.rows[:1], BLOCK, device), case.cache, case.rope).attention(case.query[:1], 1)
    torch.testing.assert_close(together[:1], alone, rtol=1e-5, atol=1e-6)
