"""Rows whose block tables begin alike share tiles: the same bits as with copies of these blocks, and what the reference
computes, whatever the rows beside them are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as remember

import pytest
import torch

from kernels.cpu.isa import Level, available_levels
from kernels.cpu.library import Library
from kernels.cpu.native import NativeOps
from kernels.interface import Ops
from kernels.ops import KVCache, new_kv_cache
from kernels.reference import ReferenceOps
from tests.support.kernel_cases import random_tensor, relative_error, rope_table
from tests.support.paged import Row, make_layout, poison

MODELS = [(9, 3, 64), (2, 2, 128), (4, 2, 20)]


@remember
def _backend(level: Level, invariant: bool, threads: int = 1) -> NativeOps:
    """On one thread few rows are enough to share tiles."""
    return NativeOps(Library(level), threads, batch_invariant=invariant)


@pytest.fixture(params=available_levels(), ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Level:
    level: Level = request.param
    return level


@dataclass(frozen=True)
class Plan:
    """A row of `count` new tokens after `start`, of which the first `shared` lie in blocks of family `family`, those
    from there to `until` in blocks of family `branch`."""

    family: int
    shared: int
    start: int
    count: int
    branch: int = 0
    until: int = 0


BATCHES: dict[str, list[Plan]] = {
    "all share everything before them": [Plan(0, 256, 256, 9 + i % 3) for i in range(12)],
    "some share more than others": [Plan(0, 128 + 64 * (i % 6), 449 + 3 * i, 5 + i) for i in range(12)],
    "two families in turns, strangers and single tokens beside": [
        *(Plan(i % 2, 320, 320 + 17 * (i % 5), 11) for i in range(10)),
        *(Plan(2 + i, 0, 200, 7) for i in range(4)),
        *(Plan(0, 256, 256 + 40 * i, 1) for i in range(3)),
        Plan(9, 0, 0, 150),
        Plan(0, 320, 330, 90),
    ],
    "prefixes that part": [Plan(0, 128, 256, 5, 1 + i // 2, 256) for i in range(16)],
    "less than is worth sharing": [Plan(0, 96, 100 + i, 6) for i in range(10)],
    "single tokens only": [Plan(i % 3 // 2, 576, 577 + i, 1) for i in range(20)],
}


def _rows(plans: Sequence[Plan], block_size: int) -> list[Row]:
    """Blocks of families first, then every row's own."""
    length = max(max(plan.shared, plan.until) for plan in plans) // block_size
    count = 1 + max(max(plan.family, plan.branch) for plan in plans)
    families = [range(i * length, (i + 1) * length) for i in range(count)]
    used, rows = count * length, []
    for plan in plans:
        parted = plan.shared // block_size
        alike = [*families[plan.family][:parted], *families[plan.branch][parted : plan.until // block_size]]
        own = -(-(plan.start + plan.count) // block_size) - len(alike)
        rows.append(Row(plan.start, plan.count, [*alike, *range(used, used + own)]))
        used += own
    return rows


def _filled_cache(rows: Sequence[Row], block_size: int, like: KVCache) -> KVCache:
    """What lies before the new tokens of each row; NaN everywhere else."""
    blocks = 1 + max(max(row.blocks) for row in rows)
    cache = new_kv_cache(1, blocks, block_size, like.num_kv_heads, like.head_dim, like.dtype, "cpu", like.storage)
    known = torch.zeros(blocks * block_size, dtype=torch.bool)
    for row in rows:
        positions = torch.arange(row.start)
        known[torch.tensor(row.blocks)[positions // block_size] * block_size + positions % block_size] = True
    poison(cache)
    pages = [*cache.layers[0], *(cache.scales[0] if cache.scales else ())]
    for seed, page in enumerate(pages):
        x = random_tensor(page.shape, torch.float32, seed)
        x = x.abs() / 50 if seed > 1 else x * 40 if cache.storage is torch.int8 else x
        page.flatten(0, 1)[known] = x.flatten(0, 1)[known].to(page.dtype)
    return cache


def _with_copies(rows: Sequence[Row], cache: KVCache) -> tuple[list[Row], KVCache]:
    """The same rows, every one with blocks that nobody else has."""
    order = [block for row in rows for block in row.blocks]
    own = iter(range(len(order)))
    apart = [Row(row.start, row.count, [next(own) for _ in row.blocks]) for row in rows]
    twin = new_kv_cache(
        1, len(order), cache.block_size, cache.num_kv_heads, cache.head_dim, cache.dtype, "cpu", cache.storage
    )
    for mine, other in zip((*twin.layers, *twin.scales), (*cache.layers, *cache.scales), strict=True):
        mine.key.copy_(other.key[order])
        mine.value.copy_(other.value[order])
    return apart, twin


def _attend(ops: Ops, rows: list[Row], cache: KVCache, heads: int) -> torch.Tensor:
    layout = make_layout(rows, cache.block_size)
    width = (heads + 2 * cache.num_kv_heads) * cache.head_dim
    qkv = random_tensor((layout.num_tokens, width), cache.dtype, 9)
    step = ops.begin(layout, cache, rope_table(cache.head_dim, layout.max_seq_len))
    return step.attention(step.rope_and_cache(qkv, 0, heads).contiguous(), 0)


@pytest.mark.parametrize("plans", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("invariant", [False, True])
def test_shared_blocks_give_the_bits_of_copies_and_what_the_reference_gives(
    level: Level, plans: list[Plan], storage: torch.dtype, dtype: torch.dtype, invariant: bool
) -> None:
    rng = random.Random(f"{len(plans)} {storage} {dtype}")
    heads, kv_heads, dim = rng.choice(MODELS)
    block_size = rng.choice([1, 16, 32])
    ops = _backend(level, invariant)
    rows = _rows(plans, block_size)
    cache = _filled_cache(rows, block_size, new_kv_cache(1, 1, 1, kv_heads, dim, dtype, "cpu", storage))
    apart, twin = _with_copies(rows, cache)
    third = _with_copies(rows, cache)
    got = _attend(ops, rows, cache, heads)
    assert torch.equal(got, _attend(ops, apart, twin, heads))
    wanted = _attend(ReferenceOps(), *third, heads)
    exact = dtype is torch.float32
    assert relative_error(got, wanted) < ((5e-3 if storage is torch.int8 else 1e-5) if exact else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_two_home_threads_share_with_those_of_their_own(level: Level, dtype: torch.dtype) -> None:
    rows = _rows([Plan(i % 2, 384, 384 + 8 * (i % 3), 32) for i in range(16)], 16)
    cache = _filled_cache(rows, 16, new_kv_cache(1, 1, 1, 3, 64, dtype, "cpu"))
    ops = _backend(level, False, threads=2)
    assert torch.equal(_attend(ops, rows, cache, 9), _attend(ops, *_with_copies(rows, cache), 9))
