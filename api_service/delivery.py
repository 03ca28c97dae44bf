"""A stream's records to its client: as server-sent events, or folded into one JSON answer.

In: a `Stream` and ASGI's receive and send. Out: bytes, keep-alive comments, and word to the relay when the client has
gone. These two are the only readers of receive() once the body is in, so no disconnect goes unseen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_service.body_writer import BODY_WRITER, BodyWriter
from api_service.chunks import StreamWriter
from api_service.sse import HEADERS, KEEP_ALIVE, error_event
from api_service.stream import Stream
from shared.errors import HeadraceError
from shared.messages import Record

__all__ = ["EventStream", "Folding", "Pulse", "collect"]

SEND_LIMIT_S = 20.0
"""A client that takes no bytes for so long is gone, whatever its socket says; its stream can be resumed."""


_FOLD_AT = 64
"""Records that are folded into one answer at a time."""


class Pulse:
    """One clock for all streams of the pod: wakes silent ones for a comment, ends those whose client reads nothing."""

    def __init__(self, keepalive_s: float) -> None:
        self.keepalive_s = keepalive_s
        self._streams: set[EventStream] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="pulse")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def add(self, stream: EventStream) -> None:
        self._streams.add(stream)

    def discard(self, stream: EventStream) -> None:
        self._streams.discard(stream)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.keepalive_s / 4))
            now = time.monotonic()
            for stream in list(self._streams):
                stream.tick(now, self.keepalive_s)


class EventStream(Response):
    """Status and headers at once, events as they come. Releases its permit and leaves the stream whatever happens."""

    def __init__(self, stream: Stream, writer: StreamWriter, pulse: Pulse, done: Callable[[], None]) -> None:
        """`done` is called once, when nothing more will be sent."""
        self.status_code = 200
        self.background = None
        self.raw_headers = list(HEADERS)
        self._stream = stream
        self._writer = writer
        self._pulse = pulse
        self._done = done
        self._gone = False
        self._due = False
        self._stalled = False
        self._sending = False
        self._active_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._body: BodyWriter | None = None
        self._fault: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._task = asyncio.current_task()
        watcher = asyncio.create_task(self._watch(receive), name="disconnect watcher")
        self._pulse.add(self)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, self._writer.opening())
            self._body = scope.get("state", {}).get(BODY_WRITER)
            if self._body is not None:
                self._body.comment = KEEP_ALIVE
            await self._relay(send)
        except asyncio.CancelledError:
            if not self._stalled:
                raise
        finally:
            self._stream.direct = None
            self._pulse.discard(self)
            watcher.cancel()
            self._done()

    def tick(self, now: float, keepalive_s: float) -> None:
        """Called by the pulse about four times per keep-alive time."""
        silent = now - self._active_at
        if self._sending and silent > SEND_LIMIT_S and self._task is not None:
            self._stalled = True
            self._task.cancel()
        elif silent >= keepalive_s and not self._sending:
            self._due = True
            self._stream.wake.set()

    async def _relay(self, send: Send) -> None:
        stream, write = self._stream, self._writer.write
        while not self._gone:
            stream.wake.clear()
            data = b"".join([write(record) for record in stream.take()])
            if stream.error is not None and not stream.ended:
                data += error_event(stream.error.body(), stream.request.rid)
            if stream.over:
                await self._send(send, data, more=False)
                return
            if data or self._due:
                await self._send(send, data or KEEP_ALIVE)
            else:
                stream.direct = None if self._body is None else self._write
                await stream.wake.wait()
                stream.direct = None
                if self._fault is not None:
                    raise self._fault

    def _write(self, record: Record) -> bool:
        """Says a record while the handler rests; the last one, and what has to wait for the client, are the handler's.

        It runs in the subscription of all streams, so a fault of this one is kept for the handler."""
        body = self._body
        if record.end is not None or body is None or not body.ready:
            return False
        try:
            if data := self._writer.write(record):
                body.write(data)
                self._active_at, self._due = time.monotonic(), False
        except Exception as error:  # noqa: BLE001 - raised again in the handler: ends its request and no other
            self._fault = error
            self._stream.wake.set()
        return True

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if not data and more:
            return
        self._sending, self._active_at = True, time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending, self._active_at, self._due = False, time.monotonic(), False

    async def _watch(self, receive: Receive) -> None:
        await _disconnected(receive)
        self._gone = True
        self._stream.wake.set()


class Folding(Protocol):
    """What makes one answer of a stream's records."""

    @property
    def error(self) -> HeadraceError | None: ...

    def add(self, record: Record) -> None: ...

    def body(self) -> bytes: ...


async def collect(stream: Stream, answer: Folding, receive: Receive) -> bool:
    """Folds the whole stream into `answer`; False when the client went away first.

    Raises the stream's error or the request's own.
    """
    watcher = asyncio.create_task(_disconnected(receive), name="disconnect watcher")
    watcher.add_done_callback(lambda _: stream.wake.set())
    stream.wake_at = _FOLD_AT
    try:
        while not watcher.done():
            stream.wake.clear()
            for record in stream.take():
                answer.add(record)
            if stream.over:
                break
            await stream.wake.wait()
    finally:
        watcher.cancel()
    error = answer.error if stream.ended else stream.error
    if error is not None:
        raise error
    return stream.ended


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
