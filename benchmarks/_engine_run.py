"""Runs requests through an engine without queue or HTTP, and notes when their tokens came."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine_worker.engine import Engine
from engine_worker.request import Klass, Request, TokenEvent
from shared.params import SamplingParams

__all__ = ["make_request", "run", "timed_step"]


def timed_step(engine: Engine) -> list[TokenEvent]:
    """A step of which the engine is told how long it took, as its thread in a worker does."""
    began = time.perf_counter()
    events = engine.step()
    engine.took(time.perf_counter() - began)
    return events


def make_request(
    name: str, prompt: Sequence[int], output: int, klass: Klass = "interactive", params: SamplingParams | None = None
) -> Request:
    """Greedy unless `params` says otherwise; it never ends before `output` tokens."""
    return Request(
        name,
        list(prompt),
        params or SamplingParams(temperature=0.0),
        0,
        max_tokens=output,
        stop_token_ids=frozenset(),
        klass=klass,
    )


def run(engine: Engine, arrivals: Sequence[tuple[float, Request]], until: float = 0.0) -> dict[str, list[float]]:
    """Adds each request once its time (seconds from now, ascending) has come -> times of the tokens of each, from then.

    Ends when nothing is left, or after `until` seconds, if given: then what still runs is aborted.
    """
    start = time.perf_counter()
    times: dict[str, list[float]] = {}
    added: dict[str, float] = {}
    pending = list(arrivals)
    while pending or engine.has_work:
        now = time.perf_counter() - start
        while pending and pending[0][0] <= now:
            _, request = pending.pop(0)
            added[request.request_id] = now
            engine.add(request)
        if until and now > until:
            for name in added:
                engine.abort(name)
            pending.clear()
        events = timed_step(engine)
        now = time.perf_counter() - start
        for event in events:
            if event.token_id is not None:
                times.setdefault(event.request_id, []).append(now - added[event.request_id])
    return times
