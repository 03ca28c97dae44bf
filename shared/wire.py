"""A Redis connection whose replies come by callback, and commands asked over it, any number at once.

In: a redis-py connection pool, which still reads the URL and greets the server (TLS, AUTH, SELECT). Out: replies.
redis-py takes a pool's lock, two time limits and several task switches for a command: on the way of a request to its
first token that was more than the commands themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import hiredis
from redis import exceptions as rx
from redis.asyncio import ConnectionPool

__all__ = ["CommandLine", "Wire"]

_T = TypeVar("_T")
_TICK_S = 1.0
_PAUSES_S = (0.02, 0.04, 0.08)
"""Before a command whose connection was lost is sent again."""
_NOT_YET: Final = object()


class Wire(asyncio.Protocol):
    """One connection. `on_reply` gets every reply in order (errors as exception objects) and must not raise; `lost` is
    done, with a REDIS_DOWN error, once the connection has ended."""

    def __init__(self, connection: Any, on_reply: Callable[[Any], None]) -> None:
        """Takes a redis-py connection over that has connected and awaits no reply."""
        self._streams = (connection._reader, connection._writer)  # they close the transport when they are collected
        self._transport: Any = connection._writer.transport
        self._on_reply = on_reply
        self._reader = hiredis.Reader(
            protocolError=rx.InvalidResponse, replyError=connection._parser.parse_error, notEnoughData=_NOT_YET
        )
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        connection._reader = connection._writer = None  # or it would warn of a connection that was not closed
        self._transport.set_protocol(self)

    @classmethod
    async def open(cls, pool: Any, on_reply: Callable[[Any], None]) -> Wire:
        """Raises redis-py's ConnectionError or TimeoutError, or what the server has against the greeting."""
        connection = pool.make_connection()
        await connection.connect()
        return cls(connection, on_reply)

    def send(self, *command: Any) -> None:
        """Never waits. Raises ConnectionError when the connection has ended."""
        if self.lost.done() or self._transport.is_closing():
            raise rx.ConnectionError("The connection to Redis was lost.")
        try:
            self._transport.write(hiredis.pack_command(command))
        except RuntimeError as error:  # uvloop's, when the peer has just closed
            raise rx.ConnectionError(f"The connection to Redis was lost: {error}") from error

    def abort(self, why: Exception) -> None:
        """Ends it at once."""
        self._end(why)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        gets, on_reply = self._reader.gets, self._on_reply
        try:
            self._reader.feed(data)
            while (reply := gets()) is not _NOT_YET:
                on_reply(reply)
        except rx.InvalidResponse as error:
            self.abort(rx.ConnectionError(f"Redis sent what is no reply: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(rx.ConnectionError(f"The connection to Redis was lost: {exc or 'it was closed'}."))

    def _end(self, why: Exception) -> None:
        if not self.lost.done():
            self.lost.set_result(why)


class CommandLine:
    """Commands of many tasks over one connection, made when it is needed. Whoever stops waiting disturbs nobody.

    A command whose connection ends before its reply is sent again, at most three times, unless `once`. With `limit_s`
    the connection ends when a reply is that late, counted in seconds in which this process ran.
    """

    def __init__(self, pool: ConnectionPool, *, limit_s: int | None, once: bool = False) -> None:
        self._pool = pool
        self._limit = limit_s
        self._pauses = () if once else _PAUSES_S
        self._wire: Wire | None = None
        self._connecting = asyncio.Lock()
        self._asked: deque[tuple[asyncio.Future[Any], int]] = deque()
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, *command: Any) -> Any:
        """The reply. Raises it when it is an error, ConnectionError or TimeoutError when there is none."""
        return await self._persist(self._ask, command)

    async def ask_all(self, *commands: Sequence[Any]) -> list[Any]:
        """The replies of commands sent at once, in order. Raises as `ask` does, the first error there is."""
        return await self._persist(self._ask_all, commands)

    def close(self) -> None:
        """Ends the connection; the next command makes another one."""
        if self._wire is not None:
            self._wire.abort(rx.ConnectionError("The connection to Redis was closed."))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _persist(self, attempt: Callable[[Sequence[Any]], Awaitable[_T]], what: Sequence[Any]) -> _T:
        for pause in self._pauses:
            try:
                return await attempt(what)
            except (rx.ConnectionError, rx.TimeoutError):
                await asyncio.sleep(pause)
        return await attempt(what)

    async def _ask(self, command: Sequence[Any]) -> Any:
        return await self._sent(await self._usable(), command)

    async def _ask_all(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        wire = await self._usable()
        return await asyncio.gather(*[self._sent(wire, command) for command in commands])

    def _sent(self, wire: Wire, command: Sequence[Any]) -> asyncio.Future[Any]:
        wire.send(*command)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append((reply, self._ticks))
        if self._timer is None and self._limit is not None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        return reply

    async def _usable(self) -> Wire:
        wire = self._wire
        return await self._connect() if wire is None or wire.lost.done() else wire

    async def _connect(self) -> Wire:
        async with self._connecting:
            if self._wire is None or self._wire.lost.done():
                asked = self._asked = deque()
                wire = await Wire.open(self._pool, lambda reply: _answer(asked, reply))
                wire.lost.add_done_callback(lambda lost: _fail(asked, lost.result()))
                self._wire = wire
            return self._wire

    def _tick(self) -> None:
        """Ages what waits. A process that was stopped for a while counts one second, not all of them."""
        self._timer = None
        self._ticks += 1
        if self._wire is None or self._limit is None or not self._asked:
            return
        if self._asked[0][1] + self._limit < self._ticks:
            self._wire.abort(rx.TimeoutError("Redis did not answer in time."))
        else:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)


def _answer(asked: deque[tuple[asyncio.Future[Any], int]], reply: Any) -> None:
    future, _ = asked.popleft()
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


def _fail(asked: deque[tuple[asyncio.Future[Any], int]], why: Exception) -> None:
    while asked:
        future, _ = asked.popleft()
        if not future.done():
            future.set_exception(why)
