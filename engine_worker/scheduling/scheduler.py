"""Decides what each step computes: decodes and prefill chunks under one token budget. No tensors, no clock.

In: requests, aborts, what a step has computed and how long it took. Out: a frozen `BatchPlan`. Owns the queues of
waiting and running requests and, through the cache manager, their blocks. Order of precedence everywhere: interactive
before batch, lower `priority`, earlier `arrival`.
"""

from __future__ import annotations

from engine_worker.cache.manager import CacheManager
from engine_worker.config import EngineConfig
from engine_worker.plan import BatchPlan
from engine_worker.request import Klass, Request
from engine_worker.scheduling.batch import BatchBuilder
from engine_worker.scheduling.cost import StepShape
from engine_worker.scheduling.pace import FLOOR_TOKENS, Pace
from engine_worker.scheduling.queues import Queues

__all__ = ["HEADROOM_TOKENS", "Scheduler"]

HEADROOM_TOKENS = 64
"""Hysteresis: a request is admitted only if it and all running ones can grow by this many tokens (or to their end)."""


class Scheduler:
    """Continuous batching over a block pool. Every known request ends in `finish`, which gives back its blocks.

    A request holds blocks for all its known tokens from admission on, so only a newly drawn token can run out of room.
    Rows of one batch are independent: none reads a block that another writes in the same step.

    Batch requests get only what interactive ones leave: they are planned last, as far as `Pace` lets them stretch the
    step, and lose seats and blocks whenever an interactive request lacks either.
    """

    def __init__(self, config: EngineConfig, cache: CacheManager, max_model_len: int, pace: Pace | None = None) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._max_running = config.max_running
        self._spare = config.spare_tokens
        self._budget = config.max_num_batched_tokens - self._spare
        self._max_model_len = max_model_len
        self._pace = pace or Pace(config.target_itl_ms / 1000)
        self._queues = Queues()
        self._step = 0
        self._shape = StepShape()
        self.num_preemptions = 0
        """Since start; also those for a seat."""
        self.num_cached_tokens = 0
        """Since start: tokens that admissions found in the cache instead of computing them."""
        self.num_queried_tokens = 0
        """Since start: tokens that admissions looked for."""
        self.num_held_back = 0
        """Running batch requests for which the last step had no room beside interactive ones."""

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    def count(self, klass: Klass) -> tuple[int, int]:
        """Running and waiting requests of this class."""
        return len(self._queues.running[klass]), len(self._queues.waiting[klass])

    @property
    def running(self) -> tuple[Request, ...]:
        """In order of precedence."""
        return tuple(self._queues.running["interactive"] + self._queues.running["batch"])

    def max_request_tokens(self) -> int:
        """Prompt + output tokens of one request at most: the context window, or the whole cache where that is smaller.

        Admission, the model card and metrics all ask here, so none of them assumes room that another has given away.
        """
        return min(self._max_model_len, self._cache.capacity_tokens)

    def get(self, request_id: str) -> Request | None:
        """A request that has not finished."""
        return self._queues.known.get(request_id)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError when its id is in use or it can never fit (see `max_request_tokens`)."""
        needed = len(request.prompt_token_ids) + request.max_tokens
        if needed > self.max_request_tokens():
            raise ValueError(f"request needs {needed} tokens, the engine holds {self.max_request_tokens()} at most")
        self._queues.add(request)

    def finish(self, request: Request, *, discard: bool = False) -> None:
        """The request ended, for whatever reason: the one way out. `discard`: nobody may find its blocks."""
        self._queues.remove(request)
        self._cache.release(request, discard=discard)

    def advance(self, request: Request, num_tokens: int) -> None:
        """A step computed the next `num_tokens` tokens of a running request."""
        before = request.num_computed_tokens
        after = request.num_computed_tokens = before + num_tokens
        if before // self._block_size != after // self._block_size:
            self._cache.computed(request, before)

    def took(self, seconds: float) -> None:
        """The planned step took so long. What is told here bounds later steps; without it nothing does."""
        self._pace.learn(self._shape, seconds)

    def schedule(self) -> BatchPlan | None:
        """The next step; None only when there is no request.

        In each class decodes first, so that a long prompt never holds them up; then prefills already begun; then new
        requests, unless blocks ran out in this very step.
        """
        self._step += 1
        self._cache.start_step()
        batch = BatchBuilder(self._step, self._budget)
        self._plan_first(batch, "interactive")
        self.num_held_back = 0
        if not batch.shape.tokens:
            self._plan_first(batch, "batch")
        elif self._queues.running["batch"] or self._queues.waiting["batch"]:
            self._plan_beside(batch)
        self._shape = batch.shape
        return batch.plan()

    def check_integrity(self) -> None:
        """Queues, statuses and blocks agree. Raises AssertionError with what is wrong."""
        self._cache.check_integrity(self.running)
        self._queues.check_integrity()

    def _plan_first(self, batch: BatchBuilder, klass: Klass) -> None:
        """Requests that share the step with none of a higher class."""
        decodes, catching_up = self._split(batch, klass)
        batch.add_decodes(decodes)
        seats = max(0, self._max_running - len(self._queues.running[klass]))
        prompts = len(catching_up) + min(seats, len(self._queues.waiting[klass]))
        batch.spare = self._spare if prompts > len(decodes) else 0
        limit = (self._pace.limit if klass == "interactive" else self._pace.limit_alone)(batch.shape, prompts)
        self._plan_prompts(batch, klass, catching_up, limit, batch.shape.tokens + FLOOR_TOKENS)
        if klass == "interactive" and batch.shape.tokens:
            self._pace.saw_interactive(batch.shape, len(decodes))

    def _plan_beside(self, batch: BatchBuilder) -> None:
        """Batch requests in a step that holds interactive ones: as many as make it little longer."""
        interactive = batch.shape.copy()
        batch.spare = 0
        limit = self._pace.batch_limit(interactive)
        decodes, catching_up = self._split(batch, "batch")
        for request in decodes:
            if batch.left > 0 and self._pace.fits(
                batch.shape.plus(request.num_computed_tokens, 1, samples=True), limit
            ):
                batch.add(request, 1)
            else:
                self.num_held_back += 1
        if not self.num_held_back:
            self._plan_prompts(batch, "batch", catching_up, limit, 0)
        self._pace.settle(interactive, batch.shape)

    def _split(self, batch: BatchBuilder, klass: Klass) -> tuple[list[Request], list[Request]]:
        """Running requests with one token left to compute, for which there is a slot; and those with more."""
        decodes: list[Request] = []
        catching_up: list[Request] = []
        running = self._queues.running[klass]
        block_size = self._block_size
        position = 0
        # Preemption shortens the list from its end, never before `position`: victims come after those looked at.
        while position < len(running):
            request = running[position]
            known = len(request.prompt_token_ids) + len(request.output_token_ids)
            if known - request.num_computed_tokens > 1:
                catching_up.append(request)
            elif known <= len(request.block_table) * block_size or self._make_room(batch, request):
                decodes.append(request)
            position += 1
        return decodes, catching_up

    def _make_room(self, batch: BatchBuilder, request: Request) -> bool:
        """A slot for the newest token, taken from the last in precedence if need be; False when that was this one."""
        while not self._cache.grow(request):
            victim = self._queues.last_running()
            self._preempt(victim)
            batch.preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Back to the queue without blocks. It catches up later as everyone does; prompt and output stay."""
        self._queues.put_back(victim)
        self._cache.release(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1

    def _plan_prompts(
        self, batch: BatchBuilder, klass: Klass, catching_up: list[Request], limit: float, least: int
    ) -> None:
        """What has more than one token to compute: of those running, then of the queue.

        The step may take `limit` seconds, or longer if it takes that to reach `least` tokens.
        """
        for request in catching_up:
            if not self._has_room(batch, limit, least):
                return
            self._plan_chunk(batch, request, limit, least)
        # Batch requests do not begin while anyone lacks blocks or waits before them: they would be displaced again.
        if klass == "batch" and (batch.has_preempted("interactive") or self._queues.waiting["interactive"]):
            return
        if not batch.has_preempted(klass):
            self._admit(batch, klass, limit, least)

    def _has_room(self, batch: BatchBuilder, limit: float, least: int) -> bool:
        """Whether a prompt gets a token in this step."""
        shape = batch.shape
        return batch.left > 0 and (shape.tokens < least or self._pace.fits(shape.plus(0, 1, samples=False), limit))

    def _plan_chunk(self, batch: BatchBuilder, request: Request, limit: float, least: int) -> None:
        """At least one token: whoever is planned here was found to have room for some."""
        start, known = request.num_computed_tokens, request.num_tokens
        rest = known - start
        wanted = rest if rest <= batch.left + batch.spare else batch.left
        num_new = self._pace.chunk(batch.shape, start, wanted, known, limit)
        num_new = max(num_new, min(wanted, max(least - batch.shape.tokens, 1)))
        if num_new < rest:
            num_new = min(num_new, batch.left)
        self._cache.announce(request, start + num_new)
        batch.add(request, num_new)

    def _admit(self, batch: BatchBuilder, klass: Klass, limit: float, least: int) -> None:
        """Takes from the queue in order, as far as seats, budget and blocks reach.

        Nobody overtakes a request of its class that lacks blocks, so none starves. One whose prefix this step computes
        steps aside for a step; only as many as there are seats are looked at.
        """
        running, waiting = self._queues.running, self._queues.waiting[klass]
        above = running["interactive"] if klass == "interactive" else [*running["interactive"], *running["batch"]]
        seats = self._max_running - len(above)
        reserve = sum(map(self._headroom, above)) if seats > 0 and waiting else 0
        alone = not above
        for request in waiting[: max(seats, 0)]:
            if not self._has_room(batch, limit, least):
                return
            if self._cache.awaits_prefix(request):
                continue
            reserve += self._headroom(request)
            # Alone it may take everything: what is queued at all fits into an empty pool.
            if not self._enter(batch, request, 0 if alone else reserve):
                return
            alone = False
            self._plan_chunk(batch, request, limit, least)

    def _enter(self, batch: BatchBuilder, request: Request, reserve: int) -> bool:
        """Gives a waiting request a seat and blocks, an interactive one also those of batch requests."""
        victims = self._queues.running["batch"] if request.klass == "interactive" else []
        lacking = self._cache.lacking(request, reserve)
        if lacking > sum(len(victim.block_table) for victim in victims):
            return False
        while lacking > 0 or self._queues.num_running >= self._max_running:
            if not victims:
                return False  # what they held was shared with those that stay
            batch.preempt(victims[-1])
            self._preempt(victims[-1])
            lacking = self._cache.lacking(request, reserve)
        found = self._cache.begin(request)
        self._queues.start(request)
        request.num_computed_tokens = found
        self.num_cached_tokens += found
        self.num_queried_tokens += request.num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(found, len(request.prompt_token_ids))
        return True

    def _headroom(self, request: Request) -> int:
        """Blocks the request may take beyond those of its known tokens within the next HEADROOM_TOKENS tokens."""
        num_prompt = len(request.prompt_token_ids)
        known, last = num_prompt + len(request.output_token_ids), num_prompt + request.max_tokens
        future = self._cache.blocks_for(min(known + HEADROOM_TOKENS, last))
        return future - (len(request.block_table) or self._cache.blocks_for(known))
