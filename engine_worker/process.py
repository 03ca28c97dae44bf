"""What a program around an engine thread needs: signals, waiting with a way out, tasks and connections that end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog
from redis.asyncio import Redis

from engine_worker.waiting import Backoff
from shared.connections import REDIS_DOWN, check_server

__all__ = ["cancel_all", "catch_signals", "close_quietly", "in_thread", "until", "wait_for_redis"]

log = structlog.get_logger(__name__)
T = TypeVar("T")
_YIELDING_NICENESS = 3
"""Half the share of what runs at 0 on a busy core."""


def catch_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def wait_for_redis(redis: Redis) -> bool:
    """Returns once the server answers and is fit. Raises UnfitServer."""
    backoff = Backoff(0.2, 5.0)
    while True:
        try:
            server = await check_server(redis)
        except REDIS_DOWN as error:
            log.warning("waiting for Redis", reason=str(error))
            await asyncio.sleep(backoff.next())
        else:
            log.info("connected", server=server.name, version=server.version)
            return True


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when `stop` came first."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    return None


async def in_thread(function: Callable[[], T], *, yields: bool = False) -> T:
    """Like asyncio.to_thread, but on a daemon thread: loading must not keep a stopped process alive.

    `yields`: it gives way to busier threads, those of other processes as well. On Linux, where priorities are a
    thread's own; threads that `function` leaves behind keep the low one.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def report(outcome: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if done.done() else outcome())

    def run() -> None:
        if yields and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _YIELDING_NICENESS)
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - carried over to the waiting thread, which raises it
            failure = error
            report(lambda: done.set_exception(failure))
        else:
            report(lambda: done.set_result(result))

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done


async def cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels and waits; what they raised before was looked at already."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def close_quietly(redis: Redis) -> None:
    """Time-limited: a half-dead connection must not keep the process."""
    try:
        async with asyncio.timeout(1.0):
            await redis.aclose()
    except REDIS_DOWN:  # the time limit is one of them
        return
