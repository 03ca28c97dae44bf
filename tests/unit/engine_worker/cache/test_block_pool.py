"""The block pool alone: three states, reference counts, eviction order."""

from __future__ import annotations

import pytest

from engine_worker.cache.block_pool import BlockPool, OutOfBlocks


def make_pool(num_blocks: int = 4) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.num_free, pool.num_cached, pool.num_held


def test_blocks_are_handed_out_from_the_lowest_id() -> None:
    pool, _ = make_pool()
    assert pool.allocate(3) == [0, 1, 2]
    assert counts(pool) == (1, 0, 3)


def test_too_many_blocks_are_refused_and_none_is_taken() -> None:
    pool, _ = make_pool()
    pool.allocate(3)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert counts(pool) == (1, 0, 3)


def test_a_released_block_is_free_unless_kept() -> None:
    pool, _ = make_pool()
    first, second = pool.allocate(2)
    pool.keep(second)
    pool.release([first, second])
    assert counts(pool) == (3, 1, 0)
    assert pool.is_cached(second)


def test_a_shared_block_is_held_until_its_last_release() -> None:
    pool, _ = make_pool()
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert counts(pool) == (3, 0, 1)
    pool.release([block])
    assert counts(pool) == (4, 0, 0)


def test_sharing_a_cached_block_takes_it_out_of_the_evictable() -> None:
    pool, evicted = make_pool(1)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.release([block])
    pool.share([block])
    assert counts(pool) == (0, 0, 1)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert evicted == []


def test_free_blocks_are_used_before_content_is_given_up_and_then_the_oldest_goes_first() -> None:
    pool, evicted = make_pool(4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.keep(block)
    pool.release([1, 0, 2])
    assert pool.allocate(1) == [3]
    assert evicted == []
    assert pool.allocate(2) == [1, 0]
    assert evicted == [1, 0]


def test_discarded_content_is_free_now_or_at_the_last_release() -> None:
    pool, _ = make_pool()
    first, second = pool.allocate(2)
    pool.keep(first)
    pool.keep(second)
    pool.release([first])
    pool.discard(first)
    pool.discard(second)
    pool.release([second])
    assert counts(pool) == (4, 0, 0)


def test_misuse_is_an_error_and_not_a_negative_count() -> None:
    pool, _ = make_pool()
    (block,) = pool.allocate(1)
    pool.release([block])
    for misuse in (pool.release, pool.share):
        with pytest.raises(ValueError, match="block 0"):
            misuse([block])
    with pytest.raises(ValueError, match="block 0"):
        pool.keep(block)
    assert counts(pool) == (4, 0, 0)


def test_check_integrity_names_what_is_wrong() -> None:
    pool, _ = make_pool()
    pool.allocate(1)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="in two states"):
        pool.check_integrity()
