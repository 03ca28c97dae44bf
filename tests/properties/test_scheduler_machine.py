"""Scheduler and cache together under any order of arrival, step, abort, preemption and take-over.

`SchedulerDrive` checks at every step that no slot is read before it was written with the reader's own prefix, that
blocks are conserved, and that work is never left unplanned; here, that every request ends with exactly the tokens of a
run alone.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine_worker.request import Request
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

    drive: SchedulerDrive

    @initialize(
        num_blocks=st.integers(9, 20),
        block_size=st.sampled_from([1, 3, 4]),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 3, 8, 40]),
        caching=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, **options: Any) -> None:
        # The capacity is the same for every block size, so that every prompt fits.
        self.drive = SchedulerDrive(num_blocks=num_blocks * 4 // block_size, block_size=block_size, **options)
        self.expected: dict[str, list[int]] = {}
        self.live: dict[str, Request] = {}

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 14), logged=st.integers(0, 6), priority=st.integers(0, 1))
    def arrive(self, prompt: list[int], max_tokens: int, logged: int, priority: int) -> None:
        """A new request, or one that another worker has brought up to `logged` tokens."""
        output = continuation(prompt, max_tokens)
        request = self.drive.add(prompt, max_tokens, output=output[: min(logged, max_tokens - 1)], priority=priority)
        self.expected[request.request_id] = output
        self.live[request.request_id] = request

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.drive.step()
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

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.drive.run()
        self.collect()
        assert not self.live
        pool = self.drive.cache.pool
        assert pool.num_free + pool.num_cached == pool.num_blocks

    def collect(self) -> None:
        for request_id, output in self.drive.outputs.items():
            assert output == self.expected[request_id]
            self.live.pop(request_id, None)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
