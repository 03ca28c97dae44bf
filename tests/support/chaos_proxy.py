"""A TCP proxy in front of Redis that misbehaves on demand: loses replies, cuts connections, swallows messages, hangs.

In: the port of a real server. Out: a URL for pods or workers. It runs in a thread of its own, so that it serves
processes while the test's own event loop comes and goes. Commands reach Redis unless `frozen`; replies get lost.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

__all__ = ["ChaosProxy", "reply_length"]

_CHUNK = 1 << 16
_POLL_S = 0.02


def reply_length(data: bytes | bytearray, start: int = 0) -> int | None:
    """Bytes of the first whole RESP2 reply at `start`; None when its end has not arrived."""
    at, missing = start, 1
    while missing:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        kind, number = data[at : at + 1], data[at + 1 : line_end]
        at = line_end + 2
        missing -= 1
        if kind == b"$" and int(number) >= 0:
            at += int(number) + 2
            if at > len(data):
                return None
        elif kind == b"*":
            missing += max(0, int(number))
    return at - start


class ChaosProxy:
    """`with ChaosProxy(server.port) as proxy: … proxy.url`. Faults are attributes, set at any time; `heal` ends all."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.drop_every = 0
        """Of every so many replies one is lost with its connection, after its command was executed; 0 = none."""
        self.swallow: bytes = b""
        """Replies and messages that contain it vanish, the connection stays; b"" = none."""
        self.frozen = False
        """Nothing passes in either direction, connections stay open."""
        self.dropped = 0
        self.swallowed = 0
        self._target_port = target_port
        self._replies = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), name="proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10), "the proxy did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def heal(self) -> None:
        self.drop_every, self.swallow, self.frozen = 0, b"", False

    def cut(self) -> None:
        """Resets every connection that stands now."""
        self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in list(self._writers)])

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=_CHUNK)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either side ends; then both do."""
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()  # Redis is down: as if nobody listened
            return
        both = {writer, upstream}
        self._writers |= both
        pumps = {
            asyncio.create_task(self._pump(reader, upstream)),
            asyncio.create_task(self._pump_replies(upstream_reader, writer)),
        }
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers -= both
            for end in both:
                end.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await self._read(reader):
            writer.write(data)
            await writer.drain()

    async def _pump_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting = bytearray()
        while data := await self._read(reader):
            waiting += data
            while (length := reply_length(waiting)) is not None:
                reply = bytes(waiting[:length])
                del waiting[:length]
                if self._lose():
                    return
                if self.swallow and self.swallow in reply:
                    self.swallowed += 1
                    continue
                writer.write(reply)
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        data = await reader.read(_CHUNK)
        while self.frozen and data:  # noqa: ASYNC110 - set from another thread
            await asyncio.sleep(_POLL_S)
        return data

    def _lose(self) -> bool:
        if not self.drop_every:
            return False
        self._replies += 1
        lost = self._replies % self.drop_every == 0
        self.dropped += lost
        return lost
