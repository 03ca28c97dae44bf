"""Whether Redis answers: asked four times a second, so that no request has to find out by waiting.

In: a URL. Out: `away` for probes and new requests, and `answer`, which stops waiting for a Redis call once Redis is
known to be away. One task and one connection of its own. Streams that run do not ask here: they wait longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
from redis.asyncio import Redis

from shared.connections import REDIS_DOWN, probing_client
from shared.errors import RedisUnavailable

__all__ = ["UNREACHABLE", "Reachability"]

PROBE_EVERY_S = 0.25
PROBE_LIMIT_S = 1.0
"""A PING that has no answer by then has failed."""
PATIENCE_S = 1.0
"""A shorter absence (a restart, a cut connection) only delays a new request; after a longer one it hears 503."""
_LATE_S = 0.25
"""A time limit that fires so much too late says that this process did not run, and nothing about Redis."""
_MAX_RETRY_AFTER_S = 10.0
_CLOSE_S = 1.0

UNREACHABLE = "The queue cannot be reached at the moment. Try again."

_T = TypeVar("_T")
log = structlog.get_logger(__name__)


class Reachability:
    """start() in the event loop that uses it, close() at the end. Before the first probe Redis counts as there."""

    def __init__(self, url: str) -> None:
        self._redis: Redis = probing_client(url)
        self._ping: Callable[[], Awaitable[object]] = self._redis.ping  # typed for both kinds of client
        self._down_since: float | None = None
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="reachability")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_CLOSE_S)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._redis.aclose()
        except REDIS_DOWN:
            return  # nothing is lost with it

    @property
    def away(self) -> bool:
        """Whether Redis has not answered for longer than PATIENCE_S."""
        return self._gone.is_set()

    def check(self) -> None:
        """Raises RedisUnavailable while Redis is away."""
        if self.away:
            raise self.error()

    def error(self) -> RedisUnavailable:
        """What a client hears; the longer the absence, the later it should come again."""
        since = self._down_since
        lasted = 0.0 if since is None else time.monotonic() - since
        return RedisUnavailable(UNREACHABLE, retry_after=min(_MAX_RETRY_AFTER_S, max(1.0, lasted)))

    async def answer(self, work: asyncio.Future[_T]) -> _T:
        """The result of `work`, or RedisUnavailable once Redis is away. Whoever stops waiting, `work` goes on."""
        work.add_done_callback(_seen)
        gone = asyncio.ensure_future(self._gone.wait())
        waiting: list[asyncio.Future[Any]] = [work, gone]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not work.done():
            raise self.error()
        return work.result()

    async def _run(self) -> None:
        while True:
            await self._probe()
            await asyncio.sleep(PROBE_EVERY_S)

    async def _probe(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                await self._ping()
        except REDIS_DOWN as error:
            now = time.monotonic()
            if now - began > PROBE_LIMIT_S + _LATE_S:
                return
            self._down_since = self._down_since or began
            if now - self._down_since >= PATIENCE_S and not self.away:
                log.warning("redis does not answer, new requests are refused", error=str(error) or "time limit")
                self._gone.set()
            return
        if self.away:
            log.info("redis answers again")
        self._down_since = None
        self._gone.clear()


def _seen(work: asyncio.Future[Any]) -> None:
    """Its exception is no surprise, even if nobody waits for it any more."""
    if not work.cancelled():
        work.exception()
