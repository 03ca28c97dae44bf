"""Decides what each step computes: decodes and prefill chunks under one token budget. No tensors, no clock.

In: requests, aborts, and what a step has computed. Out: a frozen `BatchPlan`. Owns the queues of waiting and running
requests and, through the cache manager, their blocks. Order of precedence everywhere: interactive before batch, lower
`priority`, earlier `arrival`.
"""

from __future__ import annotations

from bisect import insort

from engine_worker.cache.manager import CacheManager
from engine_worker.config import EngineConfig
from engine_worker.plan import BatchPlan
from engine_worker.request import Request, RequestStatus
from engine_worker.scheduling.batch import BatchBuilder

__all__ = ["HEADROOM_TOKENS", "Scheduler", "precedence"]

HEADROOM_TOKENS = 64
"""Hysteresis: a request is admitted only if it and all running ones can grow by this many tokens (or to their end)."""


def precedence(request: Request) -> tuple[bool, int, int]:
    """Sort key: who is served first and loses its blocks last."""
    return request.klass == "batch", request.priority, request.arrival


class Scheduler:
    """Continuous batching over a block pool. Every known request ends in `finish`, which gives back its blocks.

    A request holds blocks for all its known tokens from admission on, so only a newly drawn token can run out of room.
    Rows of one batch are independent: none reads a block that another writes in the same step.
    """

    def __init__(self, config: EngineConfig, cache: CacheManager, max_model_len: int) -> None:
        self._cache = cache
        self._max_running = config.max_running
        self._budget = config.max_num_batched_tokens
        self._max_model_len = max_model_len
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._step = 0
        self.num_preemptions = 0
        """Since start."""
        self.num_cached_tokens = 0
        """Since start: tokens that admissions found in the cache instead of computing them."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> tuple[Request, ...]:
        """In order of precedence."""
        return tuple(self._running)

    def max_request_tokens(self) -> int:
        """Prompt + output tokens of one request at most: the context window, or the whole cache where that is smaller.

        Admission, the model card and metrics all ask here, so none of them assumes room that another has given away.
        """
        return min(self._max_model_len, self._cache.capacity_tokens)

    def get(self, request_id: str) -> Request | None:
        """A request that has not finished."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError when its id is in use or it can never fit (see `max_request_tokens`)."""
        needed = len(request.prompt_token_ids) + request.max_tokens
        if needed > self.max_request_tokens():
            raise ValueError(f"request needs {needed} tokens, the engine holds {self.max_request_tokens()} at most")
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        self._requests[request.request_id] = request
        request.status = RequestStatus.WAITING
        insort(self._waiting, request, key=precedence)

    def finish(self, request: Request, *, discard: bool = False) -> None:
        """The request ended, for whatever reason: the one way out. `discard`: nobody may find its blocks."""
        queue = self._waiting if request.status is RequestStatus.WAITING else self._running
        queue.remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        self._cache.release(request, discard=discard)

    def advance(self, request: Request, num_tokens: int) -> None:
        """A step computed the next `num_tokens` tokens of a running request."""
        before = request.num_computed_tokens
        request.num_computed_tokens = before + num_tokens
        self._cache.computed(request, before)

    def schedule(self) -> BatchPlan | None:
        """The next step; None only when there is no request.

        Decodes first, so that a long prompt never holds them up; then prefills already begun; then new requests, unless
        blocks ran out in this very step.
        """
        self._step += 1
        self._cache.start_step()
        batch = BatchBuilder(self._step, self._budget)
        for request in self._plan_decodes(batch):
            if batch.left and request.status is RequestStatus.RUNNING:
                self._plan_chunk(batch, request)
        if not batch.has_preempted:
            self._admit(batch)
        return batch.plan()

    def check_integrity(self) -> None:
        """Queues, statuses and blocks agree. Raises AssertionError with what is wrong."""
        self._cache.check_integrity(self._running)
        for status, queue in ((RequestStatus.WAITING, self._waiting), (RequestStatus.RUNNING, self._running)):
            if queue != sorted(queue, key=precedence) or any(request.status is not status for request in queue):
                raise AssertionError(f"the {status.value} queue is out of order")
        if len(self._waiting) + len(self._running) != len(self._requests):
            raise AssertionError("a request is in no queue or in two")
        if any(request.block_table for request in self._waiting):
            raise AssertionError("a waiting request holds blocks")

    def _plan_decodes(self, batch: BatchBuilder) -> list[Request]:
        """Plans every running request that has one token left; returns those with more."""
        catching_up = []
        position = 0
        # Preemption shortens the list from its end, never before `position`: victims come after those already planned.
        while position < len(self._running):
            request = self._running[position]
            if request.num_tokens - request.num_computed_tokens > 1:
                catching_up.append(request)
            elif self._make_room(batch, request):
                batch.add(request, 1)
            position += 1
        return catching_up

    def _make_room(self, batch: BatchBuilder, request: Request) -> bool:
        """A slot for the newest token, taken from the last in precedence if need be; False when that was this one."""
        while not self._cache.grow(request):
            victim = self._running[-1]
            self._preempt(victim)
            batch.preempt(victim.request_id)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Back to the queue without blocks. It catches up later as everyone does; prompt and output stay."""
        self._running.remove(victim)
        self._cache.release(victim)
        victim.status = RequestStatus.WAITING
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, victim, key=precedence)

    def _plan_chunk(self, batch: BatchBuilder, request: Request) -> None:
        num_new = min(request.num_tokens - request.num_computed_tokens, batch.left)
        self._cache.announce(request, request.num_computed_tokens + num_new)
        batch.add(request, num_new)

    def _admit(self, batch: BatchBuilder) -> None:
        """Takes from the queue in order, as far as slots, budget and blocks reach.

        Nobody overtakes a request that lacks blocks, so none starves. One whose prefix this step computes steps aside
        for a step; only as many as there are free slots are looked at.
        """
        slots = self._max_running - len(self._running)
        reserve = sum(map(self._headroom, self._running)) if slots and batch.left else 0
        for request in self._waiting[:slots]:
            if not batch.left:
                return
            if self._cache.awaits_prefix(request):
                continue
            reserve += self._headroom(request)
            # Alone it may take everything: what is queued at all fits into an empty pool.
            found = self._cache.begin(request, reserve if self._running else 0)
            if found is None:
                return
            self._waiting.remove(request)
            insort(self._running, request, key=precedence)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = found
            self.num_cached_tokens += found
            if request.num_preemptions == 0:
                request.num_cached_tokens = min(found, len(request.prompt_token_ids))
            self._plan_chunk(batch, request)

    def _headroom(self, request: Request) -> int:
        """Blocks the request may take beyond those of its known tokens within the next HEADROOM_TOKENS tokens."""
        last = len(request.prompt_token_ids) + request.max_tokens
        future = self._cache.blocks_for(min(request.num_tokens + HEADROOM_TOKENS, last))
        return future - (len(request.block_table) or self._cache.blocks_for(request.num_tokens))
