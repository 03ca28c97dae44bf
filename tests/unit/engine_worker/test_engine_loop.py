"""The engine thread against an engine of a few lines."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from engine_worker.engine_loop import EngineLoop
from engine_worker.faults import Faults
from engine_worker.request import FinishReason, Klass, Request, TokenEvent
from tests.support.requests import make_request
from tests.support.wait import eventually


class CountingEngine:
    """Every step gives each request one token until it has `max_tokens`."""

    def __init__(self) -> None:
        self.inbox: deque[Request] = deque()
        self.running: list[Request] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.took_s: list[float] = []
        self.left_to_prepare = 0
        self.prepared_beside: list[bool] = []

    def took(self, seconds: float) -> None:
        self.took_s.append(seconds)

    def get_ready(self) -> bool:
        self.prepared_beside.append(self.has_work)
        self.left_to_prepare -= 1
        return self.left_to_prepare > 0

    @property
    def has_work(self) -> bool:
        return bool(self.inbox or self.running)

    def add(self, request: Request) -> None:
        self.inbox.append(request)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        self.running = [request for request in self.running if request.request_id != request_id]

    def free_seats(self, klass: Klass) -> int:
        return 4 - len(self.inbox) - len(self.running)

    def step(self) -> list[TokenEvent]:
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.threads.add(threading.current_thread().name)
        while self.inbox:
            self.running.append(self.inbox.popleft())
        for request in self.running:
            request.output_token_ids.append(len(request.output_token_ids))
        events = [TokenEvent(request.request_id, request.output_token_ids[-1]) for request in self.running]
        self.running = [request for request in self.running if len(request.output_token_ids) < request.max_tokens]
        return events


async def test_what_may_be_prepared_is_while_there_is_no_work() -> None:
    engine, events = CountingEngine(), list[TokenEvent]()
    engine.left_to_prepare = 1 << 60
    loop = EngineLoop(engine, Faults(), calm_s=0.05)
    loop.start(events.extend)
    await eventually(lambda: len(engine.prepared_beside) > 10)
    loop.add(make_request(request_id="a", max_tokens=5))
    await eventually(lambda: len(events) == 5)
    so_far = len(engine.prepared_beside)
    await eventually(lambda: len(engine.prepared_beside) > so_far)
    engine.left_to_prepare = 5
    await eventually(lambda: engine.left_to_prepare == 0)
    assert engine.prepared_beside.count(True) <= 1, "the request may arrive between the look for work and this one"
    assert await loop.stop(5)
    assert engine.left_to_prepare == 0


async def test_events_arrive_in_order_and_the_engine_stays_on_its_thread() -> None:
    engine, events = CountingEngine(), list[TokenEvent]()
    loop = EngineLoop(engine, Faults())
    loop.start(events.extend)
    loop.add(make_request(request_id="a", max_tokens=500))
    await eventually(lambda: len(events) == 500)
    assert [event.token_id for event in events] == list(range(500))
    assert engine.threads == {"engine"}
    await eventually(lambda: loop.idle)
    assert len(engine.took_s) == loop.steps
    assert all(seconds >= 0 for seconds in engine.took_s)
    assert await loop.stop(5)
    assert loop.failed.result() is None


async def test_a_paused_loop_begins_no_step_and_goes_on_afterwards() -> None:
    engine, events = CountingEngine(), list[TokenEvent]()
    loop = EngineLoop(engine, Faults())
    loop.pause(True)
    loop.start(events.extend)
    loop.add(make_request(max_tokens=3))
    assert loop.idle
    assert loop.steps == 0
    loop.pause(False)
    await eventually(lambda: len(events) == 3)
    await loop.stop(5)


async def test_the_engine_waits_for_an_asyncio_thread_that_does_not_keep_up() -> None:
    engine, events = CountingEngine(), list[TokenEvent]()
    loop = EngineLoop(engine, Faults())
    loop.start(events.extend)
    loop.add(make_request(max_tokens=1000))
    while loop.steps < 64:  # this thread is the asyncio thread: nothing is delivered meanwhile
        pass
    assert loop.steps == 64
    assert events == []
    await eventually(lambda: len(events) == 1000)
    await loop.stop(5)


async def test_whatever_ends_the_engine_is_reported() -> None:
    engine = CountingEngine()
    engine.failure = RuntimeError("device lost")
    loop = EngineLoop(engine, Faults())
    loop.start(lambda events: None)
    loop.add(make_request())
    failure = await loop.failed
    assert str(failure) == "device lost"


async def test_a_step_that_hangs_has_an_age_and_stop_does_not_wait_for_it() -> None:
    engine = CountingEngine()
    engine.gate.clear()
    loop = EngineLoop(engine, Faults())
    loop.start(lambda events: None)
    assert loop.step_age == 0.0
    loop.add(make_request())
    await eventually(lambda: loop.step_age > 0.02)
    assert not await loop.stop(0.01)
    engine.gate.set()
    assert await loop.stop(5)


@pytest.mark.parametrize(
    "spec", ["explode", "exit-on-token:", "exit-on-token:x", "step-delay-ms:-1", "hang-on-token:1,x"]
)
def test_an_unknown_fault_is_refused_with_those_there_are(spec: str) -> None:
    with pytest.raises(ValueError, match="exit-on-token:<n>, hang-on-token:<n>, step-delay-ms:<n>"):
        Faults(spec)
