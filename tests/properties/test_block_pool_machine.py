"""The block pool against a model of three plain sets, under any order of allocate, share, release, keep and discard."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine_worker.cache.block_pool import BlockPool, OutOfBlocks

NUM_BLOCKS = 7


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: a reference count per held block, the kept blocks, the cached ones in order of release."""

    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, self.evicted.append)
        self.references: dict[int, int] = {}
        self.kept: set[int] = set()
        self.cached: list[int] = []

    @property
    def free(self) -> set[int]:
        return set(range(NUM_BLOCKS)) - set(self.references) - set(self.cached)

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free, cached = self.free, list(self.cached)
        self.evicted.clear()
        try:
            blocks = self.pool.allocate(count)
        except OutOfBlocks:
            assert count > len(free) + len(cached)
            return
        expected_evictions = cached[: max(count - len(free), 0)]
        assert self.evicted == expected_evictions
        assert set(blocks) - set(expected_evictions) <= free
        assert len(set(blocks)) == count
        for block in blocks:
            self.references[block] = 1
        for block in expected_evictions:
            self.cached.remove(block)
            self.kept.discard(block)

    @precondition(lambda self: self.references or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted([*self.references, *self.cached])))
        self.pool.share([block])
        self.references[block] = self.references.get(block, 0) + 1
        if block in self.cached:
            self.cached.remove(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.references)), unique=True))
        self.pool.release(blocks)
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                if block in self.kept:
                    self.cached.append(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.keep(block)
        self.kept.add(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def discard(self, block: int) -> None:
        self.pool.discard(block)
        self.kept.discard(block)
        if block in self.cached:
            self.cached.remove(block)

    @invariant()
    def counts_agree(self) -> None:
        BlockPoolMachine.steps += 1
        self.pool.check_integrity()
        assert self.pool.num_held == len(self.references)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_held == NUM_BLOCKS
        assert all(self.pool.references(block) == count for block, count in self.references.items())


def run(steps: int) -> None:
    """At least so many rules and checks: how many an example has is up to Hypothesis."""
    BlockPoolMachine.steps = 0
    options = settings(max_examples=min(steps // 40, 400), stateful_step_count=50, deadline=None)
    while BlockPoolMachine.steps < steps:
        run_state_machine_as_test(BlockPoolMachine, settings=options)  # type: ignore[no-untyped-call]


def test_a_thousand_steps() -> None:
    run(1_000)


@pytest.mark.soak
def test_twenty_thousand_steps() -> None:
    run(20_000)
