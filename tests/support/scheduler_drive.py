"""Drives a scheduler without a model: a shadow KV cache knows what every slot holds, a pure function what follows.

An oracle for "no slot is read before it was written, and none holds anything but the request's own prefix".
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from engine_worker.cache.manager import CacheManager
from engine_worker.config import EngineConfig
from engine_worker.plan import BatchPlan, ScheduledRequest
from engine_worker.request import Request
from engine_worker.scheduling.scheduler import Scheduler
from tests.support.requests import make_request

__all__ = ["SchedulerDrive", "continuation"]


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    """What the model of these tests puts out after `tokens`: a function of all tokens so far."""
    known = list(tokens)
    for _ in range(count):
        known.append(_next_token(known))
    return known[len(tokens) :]


def _next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(repr(tokens).encode()) % 50


class SchedulerDrive:
    """`step` plans, checks and applies one batch; `outputs` collects what finished requests have put out."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 16,
        max_model_len: int = 100_000,
        caching: bool = True,
        target_itl_ms: float = 0.0,
        takes: Callable[[BatchPlan], float] | None = None,
    ) -> None:
        config = EngineConfig(
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            target_itl_ms=target_itl_ms,
        )
        self.budget = budget
        self.block_size = block_size
        self.cache = CacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(config, self.cache, max_model_len)
        self.outputs: dict[str, list[int]] = {}
        self.now = 0.0
        """Seconds that the steps so far have taken; `takes` says how long one does."""
        self.token_times: dict[str, list[float]] = {}
        self._takes = takes
        self.computed_tokens = 0
        self.steps = 0
        # What each slot holds: the tokens of its whole prefix, as one number.
        self._slots: dict[int, int] = {}

    def add(self, *args: Any, **kwargs: Any) -> Request:
        """Queues a request made by `make_request`."""
        request = make_request(*args, **kwargs)
        self.scheduler.add(request)
        return request

    def step(self) -> BatchPlan | None:
        """One step; every invariant is checked before and after it."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is None:
            assert not self.scheduler.num_running
            assert not self.scheduler.num_waiting, "work is left, but nothing is planned"
            return None
        self._check_plan(plan)
        for row in plan.rows:
            self._check_reads(row)
        for row in plan.rows:
            self._write(row)
        if self._takes is not None:
            seconds = self._takes(plan)
            self.now += seconds
            self.scheduler.took(seconds)
        for row in plan.rows:
            self._apply(row)
        self.steps += 1
        self.computed_tokens += plan.num_tokens
        self.scheduler.check_integrity()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError(f"not finished after {max_steps} steps")

    def live(self) -> list[Request]:
        """Every request that has not ended."""
        return list(self.scheduler._queues.known.values())

    def gaps(self, request: Request) -> list[float]:
        """Seconds between its tokens."""
        times = self.token_times[request.request_id]
        return [after - before for before, after in itertools.pairwise(times)]

    def slot(self, row: ScheduledRequest, position: int) -> int:
        block = row.block_table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _check_plan(self, plan: BatchPlan) -> None:
        assert plan.num_tokens == sum(row.num_new_tokens for row in plan.rows) <= self.budget
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        assert not {row.request_id for row in plan.rows} & set(plan.preempted)
        written = [
            self.slot(row, position)
            for row in plan.rows
            for position in range(row.start, row.start + row.num_new_tokens)
        ]
        assert len(written) == len(set(written)), "two tokens go to the same slot"
        for row in plan.rows:
            known = len(row.prompt_token_ids) + len(row.output_token_ids)
            assert row.num_new_tokens >= 1
            assert row.start + row.num_new_tokens <= known
            assert row.samples == (row.start + row.num_new_tokens == known)

    def _prefixes(self, row: ScheduledRequest) -> list[int]:
        value, prefixes = 0, []
        for token in row.prompt_token_ids + row.output_token_ids:
            value = zlib.crc32(token.to_bytes(8, "little"), value)
            prefixes.append(value)
        return prefixes

    def _check_reads(self, row: ScheduledRequest) -> None:
        expected = self._prefixes(row)
        for position in range(row.start):
            assert self._slots.get(self.slot(row, position)) == expected[position], (
                f"{row.request_id} would read something else than its own token {position}"
            )

    def _write(self, row: ScheduledRequest) -> None:
        expected = self._prefixes(row)
        for position in range(row.start, row.start + row.num_new_tokens):
            self._slots[self.slot(row, position)] = expected[position]

    def _apply(self, row: ScheduledRequest) -> None:
        request = self.scheduler.get(row.request_id)
        assert request is not None
        self.scheduler.advance(request, row.num_new_tokens)
        if not row.samples:
            return
        self.token_times.setdefault(request.request_id, []).append(self.now)
        request.output_token_ids.append(_next_token(request.prompt_token_ids + request.output_token_ids))
        if len(request.output_token_ids) >= request.max_tokens:
            self.scheduler.finish(request)
            self.outputs[request.request_id] = request.output_token_ids
