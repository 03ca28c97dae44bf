"""The engine thread: steps while there is work, sleeps on a condition while there is none.

In: requests and aborts from the asyncio thread. Out: the events of each step, handed over with one call per step. The
thread alone owns the Engine; others may only `add`, `abort`, pause, and read how it is getting on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from engine_worker.faults import Faults
from engine_worker.interface import SteppingEngine
from engine_worker.request import Klass, Request, TokenEvent

__all__ = ["EngineLoop"]

_T = TypeVar("_T")
_CALM_S = 2.0
"""Seconds without work before the engine prepares for more: right after the start the pod still needs the cores."""
_MAX_UNDELIVERED = 64
"""Steps whose events may wait for the asyncio thread before the engine waits for it."""


class EngineLoop:
    """Made in the asyncio thread, which receives `deliver(events)`, given to `start`, once per step that had any.

    `failed` is done as soon as the thread ends: with the exception that ended it, or None after `stop`.
    """

    def __init__(self, engine: SteppingEngine, faults: Faults, calm_s: float = _CALM_S) -> None:
        self._engine = engine
        self._deliver: Callable[[list[TokenEvent]], None] = _discard
        self._faults = faults
        self._calm_s = calm_s
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._stopping = False
        self._paused = False
        self._step_started: float | None = None
        self._handed_over = 0  # written by the engine thread only
        self._delivered = 0  # written by the asyncio thread only
        self.steps = 0
        self.failed: asyncio.Future[BaseException | None] = self._loop.create_future()
        # A daemon: a hung step must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, deliver: Callable[[list[TokenEvent]], None]) -> None:
        self._deliver = deliver
        self._thread.start()

    def add(self, request: Request) -> None:
        """Hands a request to the engine; it joins the next step."""
        self._faults.on_add(request.prompt_token_ids)
        self._engine.add(request)
        self._notify()

    def abort(self, request_id: str) -> None:
        """Ends a request; its blocks are free within two steps."""
        self._engine.abort(request_id, "abort")
        self._notify()

    def free_seats(self, klass: Klass) -> int:
        """How many more requests of this class would run at once if they came now; see `Engine.free_seats`."""
        return self._engine.free_seats(klass)

    def pause(self, paused: bool) -> None:
        """No further step begins while paused (the output cannot be stored)."""
        if paused != self._paused:
            self._paused = paused
            self._notify()

    async def stop(self, timeout: float) -> bool:
        """Ends the thread after the step it is in. False: that step took longer than `timeout` seconds."""
        self._stopping = True
        self._notify()
        done, _ = await asyncio.wait([self.failed], timeout=timeout)
        return bool(done)

    @property
    def idle(self) -> bool:
        """Whether no step is under way: nothing to do, or paused."""
        return self._step_started is None

    @property
    def step_age(self) -> float:
        """Seconds since the current step began; 0 while there is none."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._wait_for_work():
                self._step_started = began = time.monotonic()
                self._faults.before_step()
                events = self._engine.step()
                self._engine.took(time.monotonic() - began)
                self._faults.after_step()
                self.steps += 1
                self._step_started = None
                if events:
                    self._handed_over += 1
                    self._call(self._receive, events)
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread ends the process, by the main thread
            failure = error
        self._call(self._report, failure)

    def _call(self, function: Callable[[_T], None], value: _T) -> None:
        """Runs `function(value)` in the asyncio thread, unless the process is leaving without waiting for this one."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, value)

    def _wait_for_work(self) -> bool:
        """Blocks until a step can do something; False when the loop is to end. Meanwhile prepares for what may come."""
        with self._wake:
            if self._wake.wait_for(self._may_go_on, self._calm_s):
                return not self._stopping
        while not self._may_go_on() and self._engine.get_ready():
            pass
        with self._wake:
            self._wake.wait_for(self._may_go_on)
        return not self._stopping

    def _may_go_on(self) -> bool:
        return self._stopping or (self._engine.has_work and not self._held_back())

    def _held_back(self) -> bool:
        return self._paused or self._handed_over - self._delivered >= _MAX_UNDELIVERED

    def _receive(self, events: list[TokenEvent]) -> None:
        self._deliver(events)
        self._delivered += 1
        if self._handed_over - self._delivered == _MAX_UNDELIVERED - 1:
            self._notify()

    def _report(self, failure: BaseException | None) -> None:
        if not self.failed.done():
            self.failed.set_result(failure)


def _discard(_events: list[TokenEvent]) -> None:
    """Before `start` there is nobody to deliver to, and nothing to deliver."""
