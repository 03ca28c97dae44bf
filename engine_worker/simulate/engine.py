"""The simulated engine: takes requests, seats as many as it has room for, says a token for each when one is due.

The same contract as `engine.Engine`: one thread steps, any thread adds and aborts; every request ends with an event
that has a finish reason. Sampling parameters change nothing here, because nothing is drawn from a distribution.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_worker.admission import check_request
from engine_worker.interface import EngineStats
from engine_worker.request import FinishReason, Klass, Request, TokenEvent, TokenLogprobs
from engine_worker.simulate.pace import Pace
from engine_worker.simulate.tokens import TokenSource
from shared.errors import InvalidRequest
from shared.simulation import Simulation

__all__ = ["SimulatedEngine"]

_LONGEST_WAIT_S = 0.25
"""A step never takes longer: leases and drains look at how old it is."""
_BLOCK = 16
"""Tokens of a block of the cache that is shown to be in use."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request that is being answered."""

    request: Request
    key: int
    length: int
    """Tokens after which it ends by itself."""
    end_token: int | None
    """What ends it then; None: it may not end by itself."""
    first_at: float = math.inf
    """When its first token may come; set when it gets a seat."""


class SimulatedEngine:
    """`clock` in seconds and `wait` (until something arrives, or so many seconds) can be replaced for tests."""

    def __init__(
        self,
        simulation: Simulation,
        source: TokenSource,
        *,
        max_running: int,
        max_request_tokens: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._simulation = simulation
        self._source = source
        self._pace = Pace(simulation)
        self._max_running = max_running
        self._max_request_tokens = max_request_tokens
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._clock = clock
        self._arrived = threading.Event()
        self._wait = self._arrived.wait if wait is None else wait
        self._inbox: deque[Request | tuple[str, FinishReason]] = deque()
        self._lock = threading.Lock()
        self._live: dict[str, Klass] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._seated: Sequence[_Sequence] = ()
        """Replaced, never changed: other threads read it."""
        self._num_arrived = 0
        self._num_steps = 0
        self._step_times = (0.0, 0.0)
        self._counters = dict.fromkeys(("prompt_tokens", "generation_tokens", "preemptions", "cached_tokens"), 0)

    def max_request_tokens(self) -> int:
        return self._max_request_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self._sequences)

    def add(self, request: Request) -> None:
        """Raises InvalidRequest, also for what only a model can compute."""
        if request.pooling:
            raise InvalidRequest("This worker only simulates a model: it computes no embeddings.", param="model")
        if request.sampling.prompt_logprobs is not None:
            message = "This worker only simulates a model: it scores no prompts."
            raise InvalidRequest(message, param="prompt_logprobs")
        check_request(request, vocab_size=self._vocab_size, max_request_tokens=self._max_request_tokens)
        with self._lock:
            if request.request_id in self._live:
                raise InvalidRequest(f"Request id {request.request_id} is in use by a request that has not ended.")
            self._live[request.request_id] = request.klass
        self._inbox.append(request)
        self._arrived.set()

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        self._inbox.append((request_id, reason))
        self._arrived.set()

    def free_seats(self, klass: Klass) -> int:
        with self._lock:
            before = sum(klass == "batch" or other == "interactive" for other in self._live.values())
        return self._max_running - before

    def step(self) -> list[TokenEvent]:
        """What is due; when nothing is, waits a little and returns nothing."""
        started = self._clock()
        self._step_times = (started, self._step_times[1])
        self._arrived.clear()
        events = self._take_inbox()
        events += self._round(started)
        if not events:
            self._wait(self._idle_time(started))
        self._step_times = (started, self._clock())
        return events

    def took(self, seconds: float) -> None:
        """Nothing is planned by it."""

    def get_ready(self) -> bool:
        """There is nothing to prepare."""
        return False

    def stats(self) -> EngineStats:
        seated = self._seated
        with self._lock:
            live, batch = len(self._live), sum(klass == "batch" for klass in self._live.values())
        batch_running = sum(sequence.request.klass == "batch" for sequence in seated)
        start, end = self._step_times
        return EngineStats(
            running=len(seated),
            waiting=max(0, live - len(seated)),
            batch_running=batch_running,
            batch_waiting=max(0, batch - batch_running),
            blocks_used=sum(_blocks(sequence.request.num_tokens) for sequence in seated),
            blocks_cached=0,
            blocks_total=self._max_running * _blocks(self._max_request_tokens),
            steps=self._num_steps,
            last_step_start=start,
            last_step_end=end,
            counters=dict(self._counters),
        )

    def _take_inbox(self) -> list[TokenEvent]:
        """Arrivals and aborts, in the order they came."""
        events: list[TokenEvent] = []
        changed = False
        while self._inbox:
            item = self._inbox.popleft()
            changed = True
            if isinstance(item, Request):
                events += self._take(item)
            elif (sequence := self._sequences.get(item[0])) is not None:
                events.append(self._finish(sequence, item[1]))
        if changed:
            self._reseat()
        return events

    def _take(self, request: Request) -> list[TokenEvent]:
        self._num_arrived += 1
        request.arrival = request.arrival or self._num_arrived
        self._counters["prompt_tokens"] += len(request.prompt_token_ids)
        key = self._source.key(request.prompt_token_ids, request.seed if request.sampling.temperature > 0 else None)
        mean, end_token = self._simulation.answer_tokens, self._end_token(request)
        length = max(self._source.length(key, mean), request.sampling.min_tokens) if mean else 0
        sequence = _Sequence(request, key, length, end_token if mean else None)
        self._sequences[request.request_id] = sequence
        # A take-over whose last token was logged, but not its end, has nothing left to say.
        reason = _finish_reason(request)
        return [self._finish(sequence, reason)] if reason is not None else []

    def _end_token(self, request: Request) -> int | None:
        return next((token for token in self._eos if token in request.stop_token_ids), None)

    def _reseat(self) -> None:
        """Batch requests get the seats that interactive ones leave."""
        ranked = sorted(
            self._sequences.values(),
            key=lambda one: (one.request.klass == "batch", one.request.priority, one.request.arrival),
        )
        self._seated = ranked[: self._max_running]
        first_at = self._clock() + self._simulation.ttft_ms / 1000
        for sequence in self._seated:
            sequence.first_at = min(sequence.first_at, first_at)

    def _round(self, now: float) -> list[TokenEvent]:
        talking = [sequence for sequence in self._seated if sequence.first_at <= now]
        events: list[TokenEvent] = []
        for _ in range(self._pace.rounds(len(talking), now)):
            self._num_steps += 1
            said = [self._say(sequence) for sequence in talking]
            events += said
            if any(event.finish_reason for event in said):
                talking = [sequence for sequence in talking if sequence.request.request_id in self._sequences]
                self._reseat()
        return events

    def _idle_time(self, now: float) -> float:
        talking = sum(sequence.first_at <= now for sequence in self._seated)
        times = [sequence.first_at - now for sequence in self._seated if sequence.first_at > now]
        if talking:
            times.append(self._pace.wait(talking, now))
        return min([*times, _LONGEST_WAIT_S])

    def _say(self, sequence: _Sequence) -> TokenEvent:
        request = sequence.request
        token = self._next_token(sequence)
        request.output_token_ids.append(token)
        self._counters["generation_tokens"] += 1
        logprobs = self._logprobs(token, request.sampling.logprobs)
        reason = _finish_reason(request)
        if reason is None:
            return TokenEvent(request.request_id, token, logprobs)
        return self._finish(sequence, reason, token, logprobs)

    def _next_token(self, sequence: _Sequence) -> int:
        request = sequence.request
        position = len(request.output_token_ids)
        if sequence.end_token is not None and position >= sequence.length:
            return sequence.end_token
        token = self._source.token(sequence.key, position)
        skip = 0
        early = position < request.sampling.min_tokens
        while early and token in request.stop_token_ids and skip < len(self._source.vocabulary):
            skip += 1
            token = self._source.token(sequence.key, position, skip)
        return token

    def _logprobs(self, token: int, count: int | None) -> TokenLogprobs | None:
        """The token itself first, then others, each half as probable as the one before."""
        if count is None:
            return None
        others = (other for other in self._source.vocabulary if other != token)
        alternatives = [token, *(other for other, _ in zip(others, range(count - 1), strict=False))][:count]
        top = tuple((other, -math.log(2) * (rank + 1)) for rank, other in enumerate(alternatives))
        return TokenLogprobs(-math.log(2), top)

    def _finish(
        self,
        sequence: _Sequence,
        reason: FinishReason,
        token: int | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> TokenEvent:
        request = sequence.request
        del self._sequences[request.request_id]
        with self._lock:
            del self._live[request.request_id]
        stopped = reason == "stop" and _stopped(request)
        return TokenEvent(
            request.request_id,
            token_id=token,
            logprobs=logprobs,
            finish_reason=reason,
            stop_token_id=request.output_token_ids[-1] if stopped else None,
        )


def _stopped(request: Request) -> bool:
    return bool(request.output_token_ids) and request.output_token_ids[-1] in request.stop_token_ids


def _finish_reason(request: Request) -> FinishReason | None:
    if _stopped(request):
        return "stop"
    return "length" if len(request.output_token_ids) >= request.max_tokens else None


def _blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK)
