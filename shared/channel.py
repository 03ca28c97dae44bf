"""One subscribed connection per process, shared by every stream that listens.

In: channel names. Out: feeds of messages in order, with a `Resync` wherever some may be missing: after every
subscription that was made anew, and when a feed overflowed. The feed's reader then reads the log; this file never does.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import ResponseError

from shared.connections import REDIS_DOWN, subscriber_client
from shared.errors import RedisUnavailable
from shared.wire import Wire

__all__ = ["Feed", "Resync", "Subscriber"]

_FEED_LIMIT = 1024
_CONNECTION_LOST: tuple[type[Exception], ...] = (*REDIS_DOWN, ResponseError)
_CONNECT_S = 5.0
_PING_S = 5.0
_CLOSE_S = 1.0
_MAX_BACKOFF_S = 1.0


class Resync:
    """Messages may be missing here: read the log."""

    def __repr__(self) -> str:
        return "RESYNC"


RESYNC: Final = Resync()


class Feed:
    """What one listener of a channel has not read yet; bounded, so a slow reader costs its gap and not our memory."""

    def __init__(self, limit: int = _FEED_LIMIT) -> None:
        self.direct: Callable[[bytes], bool] | None = None
        """Offered a message while the reader waits: True, and it is done with without waking the reader."""
        self._items: deque[bytes | Resync] = deque()
        self._limit = limit
        self._reader: asyncio.Future[None] | None = None
        self._timeout = math.inf
        self._give_up_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._now: Callable[[], float] = time.monotonic

    async def get(self, timeout: float | None = None) -> bytes | Resync | None:
        """The next message, a Resync, or None after `timeout` seconds of silence. One reader at a time."""
        if not self._items:
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            self._timeout = math.inf if timeout is None else timeout
            self._now = loop.time
            self._give_up_at = loop.time() + self._timeout
            if self._timer is None and timeout is not None:
                self._timer = loop.call_at(self._give_up_at, self._expire)
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.popleft() if self._items else None

    def close(self) -> None:
        """Nobody reads it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def put(self, item: bytes | Resync) -> None:
        """Never blocks: an overflow drops everything for one Resync, the log has it all."""
        reader = self._reader
        waits = reader is not None and not reader.done()
        if waits and self.direct is not None and isinstance(item, bytes) and self.direct(item):
            self._give_up_at = self._now() + self._timeout
            return
        if len(self._items) >= self._limit:
            self._items.clear()
            item = RESYNC
        self._items.append(item)
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _expire(self) -> None:
        """One timer serves many waits, each of which only moves the time: setting one a token would cost more than the
        token."""
        self._timer = None
        if self._reader is None or self._reader.done() or self._give_up_at == math.inf:
            return  # the next wait that has a limit sets it again
        loop = asyncio.get_running_loop()
        if loop.time() < self._give_up_at:
            self._timer = loop.call_at(self._give_up_at, self._expire)
        else:
            self._reader.set_result(None)


class _Channel:
    """The listeners of one channel."""

    def __init__(self) -> None:
        self.feeds: set[Feed] = set()
        self.confirmed = asyncio.Event()
        self.confirmed_before = False


class Subscriber:
    """Multiplexes any number of feeds over one connection; reconnects for ever, with back-off, until closed.

    Use it in one event loop, as `async with Subscriber(url) as subscriber` or with close() at the end.
    """

    def __init__(self, url: str) -> None:
        self._client: Redis = subscriber_client(url)
        self._wire: Wire | None = None
        self._channels: dict[bytes, _Channel] = {}
        self._awaited: dict[bytes, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._now: Callable[[], float] = time.monotonic
        self._heard_at = 0.0
        self._closed = False

    async def __aenter__(self) -> Subscriber:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """Whether a connection stands now; for readiness, not for decisions."""
        return self._wire is not None

    @asynccontextmanager
    async def listen(self, name: str, timeout: float | None = None) -> AsyncIterator[Feed]:
        """A feed of everything published from now on: entered only after Redis confirmed the subscription.

        Raises RedisUnavailable when that takes longer than `timeout` seconds (None: waits as long as Redis is away).
        """
        if self._closed:
            raise RuntimeError("this subscriber is closed")
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="subscriber")
        feed, channel = Feed(), name.encode()
        if channel not in self._channels:
            self._channels[channel] = _Channel()
            self._post("SUBSCRIBE", channel)
        entry = self._channels[channel]
        entry.feeds.add(feed)
        try:
            try:
                async with asyncio.timeout(timeout):
                    await entry.confirmed.wait()
            except TimeoutError as error:
                raise RedisUnavailable("Redis did not answer in time. Try again.", retry_after=1.0) from error
            yield feed
        finally:
            feed.close()
            entry.feeds.discard(feed)
            if not entry.feeds:
                del self._channels[channel]
                self._post("UNSUBSCRIBE", channel)

    async def close(self) -> None:
        """Ends everything within about two seconds, whatever state the connection is in."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_CLOSE_S)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._client.aclose()
        except REDIS_DOWN:
            return  # nothing is lost with it: the process forgets the connection

    def _post(self, command: str, *channel: bytes) -> None:
        """Sends a command at once; without a connection nothing, because a new one subscribes to all that is wanted.

        Never awaits, so a listener that is cancelled cannot leave the bookkeeping half done.
        """
        if self._wire is None:
            return
        if command == "SUBSCRIBE":
            self._awaited[channel[0]] = self._awaited.get(channel[0], 0) + 1
        with suppress(ConnectionLost):  # what ended the connection will be seen by whoever watches it
            self._wire.send(command, *channel)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                wire = await self._connect()
                failures = 0
                await self._watch(wire)
            except _CONNECTION_LOST:
                failures += 1
            finally:
                self._disconnect()
            await asyncio.sleep(random.uniform(0, min(_MAX_BACKOFF_S, 0.02 * 2**failures)))

    async def _connect(self) -> Wire:
        pool: Any = self._client.connection_pool
        self._now = asyncio.get_running_loop().time
        self._heard_at = self._now()
        async with asyncio.timeout(_CONNECT_S):  # a listening port behind which nobody answers
            wire = await Wire.open(pool, self._hear)
        self._wire = wire
        self._awaited.clear()
        for channel in self._channels:
            self._post("SUBSCRIBE", channel)
        return wire

    def _disconnect(self) -> None:
        wire, self._wire = self._wire, None
        for entry in self._channels.values():
            entry.confirmed.clear()
        if wire is not None:
            wire.abort(ConnectionLost("This process has ended the subscription."))

    def _hear(self, message: Any) -> None:
        self._heard_at = self._now()
        if isinstance(message, list):
            if message[0] == b"message":
                self._deliver(message[1], message[2])
            elif message[0] == b"subscribe":
                self._confirm(message[1])
        elif isinstance(message, Exception) and self._wire is not None:  # else the PONG without subscriptions
            self._wire.abort(message)

    async def _watch(self, wire: Wire) -> None:
        """Pings a silent connection, so that a cut cable shows within two ping times. Raises why it has ended."""
        now = asyncio.get_running_loop().time
        while True:
            silent = now() - self._heard_at
            if silent >= _PING_S:
                before = self._heard_at
                self._post("PING")
                await _ended(wire, _PING_S)
                if self._heard_at == before:
                    raise TimeoutError("Redis does not answer on the subscribed connection")
            else:
                await _ended(wire, _PING_S - silent)

    def _deliver(self, channel: bytes, item: bytes | Resync) -> None:
        if (entry := self._channels.get(channel)) is not None:
            for feed in entry.feeds:
                feed.put(item)

    def _confirm(self, channel: bytes) -> None:
        """Only the last of several SUBSCRIBEs counts: an UNSUBSCRIBE was sent between them."""
        self._awaited[channel] -= 1
        if self._awaited[channel]:
            return
        del self._awaited[channel]
        entry = self._channels.get(channel)
        if entry is None:
            return
        if entry.confirmed_before:
            self._deliver(channel, RESYNC)
        entry.confirmed_before = True
        entry.confirmed.set()


async def _ended(wire: Wire, seconds: float) -> None:
    """Raises what ended the wire; returns after so many seconds."""
    await asyncio.wait([wire.lost], timeout=seconds)
    if wire.lost.done():
        raise wire.lost.result()
