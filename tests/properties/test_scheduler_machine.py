"""Scheduler and cache together under any order of arrival, step, abort, preemption, displacement and take-over.

`SchedulerDrive` checks at every step that no slot is read before it was written with the reader's own prefix, that
blocks are conserved, and that work is never left unplanned; here, that every request ends with exactly the tokens of a
run alone, and that nobody yields to a lower class.

Only full blocks are shared and their content never changes, so there is no copy-on-write: what takes its place is that
no two rows of a step write the same slot, and none writes into a block that another request holds too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine_worker.plan import BatchPlan
from engine_worker.request import Klass, Request
from engine_worker.scheduling.scheduler import HEADROOM_TOKENS
from tests.support.scheduler_drive import SchedulerDrive, continuation

# Few different prompts, many shared prefixes.
PROMPTS = st.builds(
    lambda base, length, tail: (base * 5)[:length] + tail,
    st.sampled_from([[1, 2, 3, 4, 5], [1, 2, 3, 9, 9], [7]]),
    st.integers(1, 18),
    st.lists(st.integers(0, 49), max_size=3),
)


class SchedulerMachine(RuleBasedStateMachine):
    """`expected` holds what every request must put out unless it is aborted."""

    steps: ClassVar[int] = 0
    seen: ClassVar[Counter[str]] = Counter()
    """How often what must be tested has happened."""

    drive: SchedulerDrive

    @initialize(
        num_blocks=st.integers(9, 13),
        block_size=st.sampled_from([1, 3, 4]),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 3, 8, 40]),
        caching=st.booleans(),
        target_itl_ms=st.sampled_from([0.0, 8.0, 30.0]),
        per_token=st.sampled_from([0.0, 0.0001, 0.004, 0.1]),
        headroom=st.sampled_from([0, 0, HEADROOM_TOKENS]),
    )
    def start(self, num_blocks: int, block_size: int, per_token: float, headroom: int, **options: Any) -> None:
        # As it is, the headroom holds all that a request may put out here, and nobody would ever run out of blocks.
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr("engine_worker.scheduling.scheduler.HEADROOM_TOKENS", headroom)
        # The capacity is the same for every block size, so that every prompt fits.
        self.drive = SchedulerDrive(
            num_blocks=num_blocks * 4 // block_size,
            block_size=block_size,
            # 0: nobody says how long steps take, and nothing but tokens bounds them.
            takes=(lambda plan: 0.005 + per_token * plan.num_tokens) if per_token else None,
            **options,
        )
        self.expected: dict[str, list[int]] = {}
        self.live: dict[str, Request] = {}
        self.classes: dict[str, Klass] = {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 14),
        logged=st.integers(0, 6),
        priority=st.integers(0, 1),
        klass=st.sampled_from(["interactive", "batch"]),
    )
    def arrive(self, prompt: list[int], max_tokens: int, logged: int, priority: int, klass: Klass) -> None:
        """A new request, or one that another worker has brought up to `logged` tokens."""
        output = continuation(prompt, max_tokens)
        known = output[: min(logged, max_tokens - 1)]
        number = len(self.classes)
        request = self.drive.add(
            prompt,
            max_tokens,
            output=known,
            priority=priority,
            klass=klass,
            request_id=f"{number:03}",  # a function of the rules so far, as Hypothesis needs it
            arrival=number,
        )
        self.expected[request.request_id] = output
        self.live[request.request_id] = request
        self.classes[request.request_id] = klass

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            before = {request.request_id for request in self.drive.scheduler.running}
            cached = self.drive.scheduler.num_cached_tokens
            plan = self.drive.step()
            if plan is not None:
                self.check_classes(plan, before)
                self.note(plan, self.drive.scheduler.num_cached_tokens > cached)
        self.collect()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        del self.expected[request.request_id]
        self.drive.scheduler.finish(request, discard=data.draw(st.booleans()))
        self.drive.scheduler.check_integrity()

    @precondition(lambda self: self.drive.scheduler.num_running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.drive.scheduler._preempt(data.draw(st.sampled_from(self.drive.scheduler.running)))
        self.drive.scheduler.check_integrity()

    def check_classes(self, plan: BatchPlan, before: set[str]) -> None:
        """Nobody loses blocks while a lower class keeps its own; no batch request begins past an interactive one."""
        lost = {self.live[request_id].klass for request_id in plan.preempted}
        running = self.drive.scheduler.count("batch")[0]
        if "interactive" in lost:
            assert not any(self.klass(row.request_id) == "batch" for row in plan.rows)
            assert running == 0
        begun = {row.request_id for row in plan.rows} - before
        if any(self.klass(request_id) == "batch" for request_id in begun):
            assert self.drive.scheduler.count("interactive")[1] == 0
            assert not plan.preempted

    def note(self, plan: BatchPlan, hit: bool) -> None:
        SchedulerMachine.steps += 1
        classes = {self.klass(row.request_id) for row in plan.rows}
        lost = {self.klass(request_id) for request_id in plan.preempted}
        happened = {
            "mixed classes": len(classes) == 2,
            "batch displaced": "batch" in lost,
            "interactive preempted": "interactive" in lost,
            "batch held back": self.drive.scheduler.num_held_back > 0,
            "chunk": any(row.num_new_tokens > 1 and not row.samples for row in plan.rows),
            "hit": hit,
            "resume": any(row.start == 0 and row.output_token_ids for row in plan.rows),
        }
        SchedulerMachine.seen.update(name for name, true in happened.items() if true)

    def klass(self, request_id: str) -> Klass:
        return self.classes[request_id]

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        try:
            self.drive.run()
        finally:
            self.patches.undo()
        self.collect()
        assert not self.live
        pool = self.drive.cache.pool
        assert pool.num_free + pool.num_cached == pool.num_blocks

    def collect(self) -> None:
        for request_id, output in self.drive.outputs.items():
            assert output == self.expected[request_id]
            self.live.pop(request_id, None)


def run(steps: int) -> None:
    """At least so many steps of the scheduler: how many an example has is up to Hypothesis."""
    SchedulerMachine.steps = 0
    SchedulerMachine.seen.clear()
    options = settings(max_examples=min(steps // 10, 400), stateful_step_count=30, deadline=None)
    while SchedulerMachine.steps < steps:
        run_state_machine_as_test(SchedulerMachine, settings=options)  # type: ignore[no-untyped-call]


def test_a_thousand_steps() -> None:
    run(1_000)


@pytest.mark.soak
def test_twenty_thousand_steps() -> None:
    run(20_000)
    # Chance leaves nothing out that matters, or this test would not test it.
    assert len(SchedulerMachine.seen) == 7
    assert min(SchedulerMachine.seen.values()) >= 5
