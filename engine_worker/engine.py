"""The loop: requests in, tokens out. One step takes the inbox, plans, executes, applies, and returns what happened.

The engine thread owns everything here. `add`, `abort` and `stats` alone may be called from other threads; what they
hand over waits in the inbox for the next step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from engine_worker.admission import check_request
from engine_worker.cache.manager import CacheManager
from engine_worker.config import EngineConfig
from engine_worker.interface import EngineStats
from engine_worker.isolation import Outcome, RowFailure, RowResult, run_isolated
from engine_worker.models.base import LoadedModel
from engine_worker.plan import BatchPlan, ScheduledRequest
from engine_worker.prompt_results import embedding_of, take_measured
from engine_worker.request import FinishReason, Klass, Request, TokenEvent
from engine_worker.runner.runner import Runner
from engine_worker.sampling.sampler import SampledToken, Sampler
from engine_worker.scheduling.scheduler import Scheduler
from shared.errors import EngineFailure, InvalidRequest

__all__ = ["Engine"]

_HOPELESS_AFTER = 3
"""Steps in a row in which every request failed: then it is the engine that is broken, not a request."""


class Engine:
    """Continuous batching of one model on one device.

    Raises ValueError when `config` does not fit the model (see EngineConfig).
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        num_blocks = config.count_blocks(config.block_size * loaded.config.kv_bytes_per_token())
        window = loaded.config.max_model_len
        cache = CacheManager(
            num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            model_key=loaded.fingerprint,
        )
        self._pool = cache.pool
        self._scheduler = Scheduler(config, cache, min(window, config.max_model_len or window))
        self._runner = Runner(loaded.model, config, num_blocks, self._scheduler.max_request_tokens())
        self._sampler = Sampler(loaded.ops)
        self._vocab_size = loaded.config.vocab_size
        self._inbox: deque[Request | tuple[str, FinishReason]] = deque()
        self._lock = threading.Lock()
        self._live: dict[str, Klass] = {}
        self._num_live: dict[Klass, int] = {"interactive": 0, "batch": 0}
        self._max_running = config.max_running
        self._num_arrived = 0
        self._num_steps = 0
        self._num_hopeless = 0
        self._last_step_start = 0.0
        self._last_step_end = 0.0
        self._is_typical = False
        """Whether the last step computed its plan, in one go."""
        self._counters = dict.fromkeys(("prompt_tokens", "generation_tokens", "computed_tokens"), 0)

    def max_request_tokens(self) -> int:
        """Prompt + output tokens of one request at most; what `add` refuses beyond."""
        return self._scheduler.max_request_tokens()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._inbox or self._scheduler.num_waiting or self._scheduler.num_running)

    def add(self, request: Request) -> None:
        """Hands over a request; the engine alone changes it from now on. Thread-safe.

        Raises InvalidRequest, also for an id that has not ended yet, and ContextLengthExceeded for one that can never
        fit. Whatever is not refused here ends with an event that has a finish reason.
        """
        check_request(request, vocab_size=self._vocab_size, max_request_tokens=self.max_request_tokens())
        with self._lock:
            if request.request_id in self._live:
                raise InvalidRequest(f"Request id {request.request_id} is in use by a request that has not ended.")
            self._live[request.request_id] = request.klass
            self._num_live[request.klass] += 1
        self._inbox.append(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Ends a request at the next step, with `reason`; one that has ended already is left alone. Thread-safe."""
        self._inbox.append((request_id, reason))

    def free_seats(self, klass: Klass) -> int:
        """How many more requests of this class would run at once if they came now. Thread-safe.

        Negative: that many wait for a seat. Seats of batch requests count as free for interactive ones, which displace
        them; for batch requests none is free while some of them stand still beside interactive ones. What `add` has
        taken counts from that moment on, what has ended from the end of its last step.
        """
        left = self._max_running - self._num_live["interactive"]
        if klass == "interactive":
            return left
        return min(left - self._num_live["batch"], 0 if self._scheduler.num_held_back else left)

    def step(self) -> list[TokenEvent]:
        """One pass of the loop. Raises only what no single request is to blame for: then this engine is done for."""
        self._last_step_start = time.monotonic()
        events = self._take_inbox()
        plan = self._scheduler.schedule()
        if plan is not None:
            outcomes = run_isolated(plan.rows, self._compute)
            self._check_health(outcomes)
            events += self._apply(plan, outcomes)
            self._is_typical = not any(isinstance(outcome, RowFailure) for outcome in outcomes)
        self._last_step_end = time.monotonic()
        return events

    def took(self, seconds: float) -> None:
        """The last step took so long, for whoever runs it: later plans go by that. Without it nothing bounds them."""
        if self._is_typical:
            self._is_typical = False
            self._scheduler.took(seconds)

    def get_ready(self) -> bool:
        """See `SteppingEngine.get_ready`."""
        return self._runner.get_ready()

    def stats(self) -> EngineStats:
        """Thread-safe as far as needed: numbers of one moment or the next."""
        batch_running, batch_waiting = self._scheduler.count("batch")
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            batch_running=batch_running,
            batch_waiting=batch_waiting,
            blocks_used=self._pool.num_held,
            blocks_cached=self._pool.num_cached,
            blocks_total=self._pool.num_blocks,
            steps=self._num_steps,
            last_step_start=self._last_step_start,
            last_step_end=self._last_step_end,
            counters=self._counters
            | {
                "preemptions": self._scheduler.num_preemptions,
                "cached_tokens": self._scheduler.num_cached_tokens,
                "queried_tokens": self._scheduler.num_queried_tokens,
            },
        )

    def check_integrity(self) -> None:
        """Queues and blocks agree: free + cached + held = total. Raises AssertionError; for tests and idle moments."""
        self._scheduler.check_integrity()

    def _take_inbox(self) -> list[TokenEvent]:
        """Arrivals and aborts, in the order they came."""
        events: list[TokenEvent] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                events += self._take(item)
            elif (request := self._scheduler.get(item[0])) is not None:
                events.append(self._finish(request, item[1]))
        return events

    def _take(self, request: Request) -> list[TokenEvent]:
        self._num_arrived += 1
        request.arrival = request.arrival or self._num_arrived
        self._counters["prompt_tokens"] += len(request.prompt_token_ids)
        self._scheduler.add(request)
        # A take-over whose last token was logged, but not its end, has nothing left to compute.
        reason = _finish_reason(request)
        return [self._finish(request, reason)] if reason is not None else []

    def _compute(self, rows: Sequence[ScheduledRequest]) -> list[Outcome]:
        """Runs the model and samples: one outcome per row."""
        drawing = [row for row in rows if row.samples]
        wanted = self._sampler.prepare(drawing, self._vocab_size)
        output = self._runner.run(rows, wanted)
        drawn = iter(self._sampler.sample(output.logits, output.best, output.peaks, drawing, wanted))
        return [RowResult(next(drawn) if row.samples else None, output.measured.get(i)) for i, row in enumerate(rows)]

    def _check_health(self, outcomes: Sequence[Outcome]) -> None:
        failures = [outcome.error for outcome in outcomes if isinstance(outcome, RowFailure)]
        self._num_hopeless = self._num_hopeless + 1 if len(failures) == len(outcomes) else 0
        # Several rows that all fail have nothing to do with each other: blame the engine at once.
        if self._num_hopeless >= _HOPELESS_AFTER or (self._num_hopeless and len(failures) > 1):
            raise failures[-1]

    def _apply(self, plan: BatchPlan, outcomes: Sequence[Outcome]) -> list[TokenEvent]:
        """The only writer of progress: positions computed, tokens drawn, ends."""
        self._num_steps += 1
        self._counters["computed_tokens"] += plan.num_tokens
        events: list[TokenEvent] = []
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            request = self._scheduler.get(row.request_id)
            assert request is not None, "requests end between steps only"
            if isinstance(outcome, RowFailure):
                events.append(self._fail(request, "The engine failed while computing this request."))
                continue
            self._scheduler.advance(request, row.num_new_tokens)
            if outcome.measured is not None:
                events += take_measured(request, row, outcome.measured)
            if outcome.sampled is not None:
                events.append(self._apply_token(request, outcome.sampled))
            elif request.max_tokens == 0 and request.num_computed_tokens == request.num_tokens:
                events.append(self._finish(request, "stop" if request.pooling else "length"))
        return events

    def _apply_token(self, request: Request, sampled: SampledToken) -> TokenEvent:
        token = sampled.token_id
        if token is None:
            return self._without_token(request, sampled)
        request.output_token_ids.append(token)
        self._counters["generation_tokens"] += 1
        reason = _finish_reason(request)
        if reason is None:
            # The hits go with every token: a stop string or a cancellation ends the choice without our saying so.
            return TokenEvent(request.request_id, token, sampled.logprobs, num_cached_tokens=request.num_cached_tokens)
        return self._finish(request, reason, sampled)

    def _without_token(self, request: Request, sampled: SampledToken) -> TokenEvent:
        """The end where nothing can follow: by the request's own fields, by its grammar, or by a fault of the model."""
        if sampled.exhausted:
            return self._finish(request, "stop", sampled)
        if request.matcher is not None and request.matcher.failed:
            why = "The output's grammar cannot go on: it has become too complex."
            return self._fail(request, why, InvalidRequest.code)
        return self._fail(request, "No token can follow: the model's output is not finite.")

    def _finish(self, request: Request, reason: FinishReason, sampled: SampledToken | None = None) -> TokenEvent:
        self._forget(request)
        return TokenEvent(
            request.request_id,
            token_id=sampled.token_id if sampled else None,
            logprobs=sampled.logprobs if sampled else None,
            finish_reason=reason,
            stop_token_id=request.output_token_ids[-1] if reason == "stop" and _stopped(request) else None,
            num_cached_tokens=request.num_cached_tokens,
            embedding=embedding_of(request),
            exhausted=bool(sampled and sampled.exhausted),
        )

    def _fail(self, request: Request, message: str, code: str = EngineFailure.code) -> TokenEvent:
        self._forget(request, discard=True)
        return TokenEvent(
            request.request_id,
            finish_reason="error",
            error_code=code,
            error_message=message,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _forget(self, request: Request, *, discard: bool = False) -> None:
        self._scheduler.finish(request, discard=discard)
        with self._lock:
            self._num_live[self._live.pop(request.request_id)] -= 1


def _stopped(request: Request) -> bool:
    return bool(request.output_token_ids) and request.output_token_ids[-1] in request.stop_token_ids


def _finish_reason(request: Request) -> FinishReason | None:
    """Whether the tokens so far end the request: by a stop token, else by their number (and nothing to measure)."""
    if _stopped(request):
        return "stop"
    measuring = request.max_tokens == 0 and (request.pooling or request.num_measured < request.num_tokens)
    return "length" if len(request.output_token_ids) >= request.max_tokens and not measuring else None
