"""The kinds of Redis client, and what "Redis is not there now" means.

In: a URL. Out: asyncio clients that speak bytes (RESP2). Each kind exists because one client cannot serve all: commands
want a time limit and retries, blocking reads neither, a subscription must never be repaired behind its owner's back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import hiredis
from redis import exceptions as rx
from redis.asyncio import (
    BlockingConnectionPool,
    Connection,
    ConnectionPool,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.typing import EncodableT

from shared.wire import CommandLine

__all__ = [
    "REDIS_DOWN",
    "ServerInfo",
    "UnfitServer",
    "blocking_client",
    "check_server",
    "command_client",
    "probing_client",
    "subscriber_client",
    "together",
]

REDIS_DOWN: tuple[type[Exception], ...] = (
    rx.ConnectionError,  # also BusyLoading, MaxConnections, authentication
    rx.TimeoutError,
    rx.ReadOnlyError,  # a replica after a failover
    rx.OutOfMemoryError,  # noeviction and full: wait, do not lose
    rx.MasterDownError,
    rx.TryAgainError,
    rx.ClusterDownError,
    OSError,
)
"""Wait and try again on these; anything else is a fault of ours."""

_CONNECT_TIMEOUT_S = 3.0
_READ_TIMEOUT_S = 5


class _Mended:
    """Two things that redis-py's asyncio connections do otherwise.

    uvloop raises a bare RuntimeError for a write to a transport that the peer has just closed, and they pass it on: it
    means what every lost connection means. They pack commands in Python, which took a worker longer than all else it
    did for a commit: hiredis packs them as well.
    """

    def pack_command(self, *args: EncodableT) -> list[bytes]:
        name = args[0]
        words = name.split() if isinstance(name, str) else [name]  # "CONFIG GET" travels as two
        return [hiredis.pack_command((*words, *args[1:]))]

    async def send_packed_command(self, command: str | bytes | Iterable[bytes], check_health: bool = True) -> None:
        parent: Any = super()
        try:
            await parent.send_packed_command(command, check_health=check_health)
        except RuntimeError as error:
            if "closed" not in str(error):
                raise
            raise rx.ConnectionError(f"Connection lost while writing: {error}") from error


class _Tcp(_Mended, Connection):
    pass


class _Tls(_Mended, SSLConnection):
    pass


class _Unix(_Mended, UnixDomainSocketConnection):
    pass


_CONNECTIONS: dict[type, type] = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}


class _Direct(Redis):
    """Sends what is asked all the time over a line of its own, and the other commands as redis-py does, which takes a
    hundred calls for one."""

    direct: ClassVar[frozenset[str]] = frozenset({"EVALSHA", "EVAL", "GET", "SET", "SMEMBERS", "PEXPIRE", "SADD"})

    @cached_property
    def line(self) -> CommandLine:
        return CommandLine(self.connection_pool, limit_s=_READ_TIMEOUT_S)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] in self.direct:
            return self._finished(args[0], await self.line.ask(*args), options)
        others: Any = super()
        return await others.execute_command(*args, **options)

    def _finished(self, name: str, reply: Any, options: dict[str, Any]) -> Any:
        """The reply in the form that the client's methods give."""
        options.pop("keys", None)  # for a cache that we do not use
        finish: Any = self.response_callbacks.get(name)
        return reply if finish is None else finish(reply, **options)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self.line.close()
        await super().aclose(close_connection_pool)


class _Blocking(_Direct):
    """A read that nobody waits for any more ends with its connection."""

    direct = frozenset({"BLPOP", "PING"})

    @cached_property
    def line(self) -> CommandLine:
        return CommandLine(self.connection_pool, limit_s=None, once=True)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)
        except asyncio.CancelledError:
            self.line.close()
            raise


async def together(redis: Redis, *commands: Sequence[Any]) -> list[Any]:
    """Replies of commands that are sent at once and run one after the other, each as the server gives it."""
    if isinstance(redis, _Direct):
        return await redis.line.ask_all(*commands)
    async with redis.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = await pipe.execute()
        return replies


class UnfitServer(Exception):
    """The server can be reached but must not be used; the message says what to change."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    name: str
    """"redis" or "valkey"."""
    version: str
    run_id: str


def command_client(url: str, *, max_connections: int = 64, wait_s: float = 5.0) -> Redis:
    """For every command that answers at once. An exhausted pool waits up to `wait_s` and then raises ConnectionError.

    Retries 3 times on lost connections, so every command sent through it must bear being executed twice.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=wait_s,
        socket_timeout=float(_READ_TIMEOUT_S),
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.02), 3),
        protocol=2,
    )
    return _client(pool, _Direct)


def blocking_client(url: str) -> Redis:
    """For BLPOP: no read time limit and no retries, because either would give an element to a connection that nobody
    reads any more. One call at a time."""
    return _bare_client(url, _Blocking)


def subscriber_client(url: str) -> Redis:
    """For one pub/sub connection: no read time limit and no retries, so that a loss is seen and the log is read."""
    return _bare_client(url)


def probing_client(url: str) -> Redis:
    """For PING alone, with its user's own time limit: no retries, so that an absence shows at once."""
    return _bare_client(url, _Blocking)


def _bare_client(url: str, kind: type[Redis] = Redis) -> Redis:
    pool = ConnectionPool.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return _client(pool, kind)


def _client(pool: ConnectionPool, kind: type[Redis]) -> Redis:
    pool.connection_class = _CONNECTIONS[pool.connection_class]
    return kind.from_pool(pool)


async def check_server(redis: Redis) -> ServerInfo:
    """Refuses a server that would lose requests: older than 7.0, or with an eviction policy. Raises UnfitServer."""
    info = await redis.info()
    version = str(info["redis_version"])
    name = str(info.get("server_name", "redis"))
    if int(version.split(".")[0]) < 7:
        raise UnfitServer(f"Redis {version} is too old: Headrace needs Redis 7.0 or newer, or Valkey.")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise UnfitServer(
            f"Redis runs with maxmemory-policy {policy}, which throws queued requests away when memory is short. "
            "Set it to noeviction (CONFIG SET maxmemory-policy noeviction)."
        )
    return ServerInfo(name, str(info.get("valkey_version", version)), str(info["run_id"]))
