"""uvicorn's HTTP protocol with bounds: bytes and time of a request that is still coming, pipelining, connections.

In: bytes of one connection. Out: requests for the app, or an error in OpenAI's form and the end of the connection. It
never stops reading while a request is answered, so that a client's going away is seen at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from api_service.body_writer import BODY_WRITER, BodyWriter
from api_service.crowded import refusing
from api_service.half_closed import Probing
from api_service.sse import json_bytes
from shared.errors import HeadersTooLarge, HeadraceError, InvalidRequest, RequestTimeout

__all__ = ["EdgeLimits", "PodProtocol", "protocol_class"]

_MAX_HEADERS = 200
_MAX_PIPELINED = 16
_MAX_PIPELINED_BYTES = 64 * 1024
"""Requests and bytes of bodies that may wait behind the one that is being answered."""
_CROWDED_S = 2.0
"""A connection beyond the limit gets this long to send the request that it is refused with."""
_LINGER_S = 2.0
"""So long a refused client may go on sending what nobody looks at."""

_UPGRADE_WORDS = {b"upgrade", b"http2-settings"}

_Stage = Literal["idle", "head", "body"]


def _nothing(_: str) -> None:
    """Nobody counts."""


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Of one server. Times in seconds, from the first byte of a request's head or the end of it."""

    max_header_bytes: int = 64 * 1024
    """Request line and headers together."""
    header_timeout_s: float = 20.0
    body_timeout_s: float = 120.0
    max_connections: int = 4096
    refused: Callable[[str], None] = _nothing
    """Called with the code of every error that is answered here."""


class _Refused(Exception):
    """Raised in a parser's callback to end the parsing; why is in `_refusal`."""


class PodProtocol(HttpToolsProtocol):
    """One connection. `_answering` is the request whose app runs; requests behind it wait in `pipeline`."""

    limits: ClassVar[EdgeLimits] = EdgeLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answering: RequestResponseCycle | None = None
        self._stage: _Stage = "idle"
        self._unread = 0
        """Bytes since the parser last got anywhere: of a head, or of trailers and the like in a body."""
        self._progress = False
        self._ahead = 0
        """Bytes of bodies that wait in the pipeline."""
        self._crowded = False
        self._refusal: HeadraceError | None = None
        self._upgrade = False
        """The head that was just parsed asks for another protocol."""
        self._deaf = False
        """What still comes is thrown away: the connection ends with the answers that are due."""
        self._timer: asyncio.TimerHandle | None = None
        self._timed: _Stage = "idle"
        self._probing: Probing | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._crowded = len(self.connections) > self.limits.max_connections
        if self._crowded:
            self.app = refusing(self.app, self.limits.refused)
        # uvicorn lets a connection that never says anything live for ever.
        idle_s = _CROWDED_S if self._crowded else self.timeout_keep_alive
        self.timeout_keep_alive_task = self.loop.call_later(idle_s, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the newest request only, which may be waiting behind the one that is being answered."""
        self._set_timer("idle")
        if self._probing is not None:
            self._probing.stop()
        self._unset_keepalive_if_required()
        if (due := self._due) is not None:
            due.disconnected = True
            due.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Whole requests are answered, as long as it turns out to listen."""
        due = self._due
        if due is None or not Probing.possible(due) or (self._stage == "body" and self.cycle is due):
            return False
        if not self._deaf:
            self._refuse(None)
        if self._probing is None:
            self._probing = Probing(self.loop, self.transport, lambda: self._due)
            self._probing.start()
        return True

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unread += len(data)
        self._progress = False
        try:
            self._feed(data)
        except (httptools.HttpParserError, _Refused):
            self._refuse(self._refusal or InvalidRequest("The request is not valid HTTP/1.1."))
            return
        if self._progress:
            self._unread = 0
        if self._unread > self.limits.max_header_bytes:
            self._refuse(self._headers_too_large())
        elif len(self.pipeline) > _MAX_PIPELINED:
            self._refuse(None)
        else:
            self._set_timer(self._stage)
        if self._stage != "idle" or self._due is not None:  # empty lines alone keep no connection
            self._unset_keepalive_if_required()

    def on_message_begin(self) -> None:
        self._stage = "head"
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= _MAX_HEADERS:
            self._stop_parsing(self._headers_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._stop_parsing(self._headers_too_large())
        self._upgrade = self.parser.should_upgrade()
        if self._upgrade:
            return  # it comes again, see _feed
        self._stage, self._progress = "body", True
        super().on_headers_complete()
        if self.cycle is not self._answering:
            self.flow.resume_reading()  # uvicorn has paused it, and would not see the client leave

    def on_body(self, body: bytes) -> None:
        self._progress = True
        if self.cycle is not self._answering:
            self._ahead += len(body)
            if self._ahead > _MAX_PIPELINED_BYTES:
                raise _Refused
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        self._stage, self._progress = "idle", True
        self._set_timer("idle")
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cycle.scope["state"][BODY_WRITER] = BodyWriter(cycle)
        self._ahead = sum(len(waiting.body) for waiting, _ in self.pipeline)
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Through the parser, which takes whatever follows a request to upgrade for another protocol, its body too. A
        server may go on with HTTP/1.1, and clients that ask for HTTP/2 with every request count on it: such a request
        is parsed again without the wish."""
        while len(self.pipeline) <= _MAX_PIPELINED:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._stop_parsing(InvalidRequest("CONNECT is not allowed: this is no proxy."))
                data = self._without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            else:
                return

    def _without_upgrade(self) -> bytes:
        """The head of the request that was just parsed."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            words = value.split(b",") if name == b"connection" else [value]
            kept = [word for word in words if word.strip().lower() not in _UPGRADE_WORDS]
            if name not in _UPGRADE_WORDS and kept:
                lines.append(name + b": " + b",".join(kept))
        return b"\r\n".join([*lines, b"", b""])

    def _stop_parsing(self, error: HeadraceError) -> None:
        self._refusal = error
        raise _Refused

    def _headers_too_large(self) -> HeadraceError:
        return HeadersTooLarge(
            f"The request line and headers may have {self.limits.max_header_bytes} bytes and {_MAX_HEADERS} headers."
        )

    def _set_timer(self, stage: _Stage) -> None:
        """The time limit of what is coming now; the one of the same stage of the same request goes on."""
        if stage == self._timed and stage != "idle":
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = stage
        if stage != "idle":
            self._timer = self.loop.call_later(self._seconds(stage), self._too_slow)

    def _seconds(self, stage: _Stage) -> float:
        if self._crowded:
            return _CROWDED_S
        return self.limits.header_timeout_s if stage == "head" else self.limits.body_timeout_s

    def _too_slow(self) -> None:
        self._timer = None
        part = "headers" if self._stage == "head" else "body"
        seconds = self._seconds(self._stage)
        self._refuse(RequestTimeout(f"The request's {part} did not arrive within {seconds:g} seconds."))

    @property
    def _due(self) -> RequestResponseCycle | None:
        """The request that is being answered."""
        active = self._answering
        return None if active is None or active.response_complete else active

    def _refuse(self, error: HeadraceError | None) -> None:
        """Ends the connection: with `error` if the request that is coming is the next to be answered, else after the
        answers that are due to complete requests before it."""
        self._deaf = True
        self._set_timer("idle")
        self.flow.resume_reading()
        due = self._due
        coming = self.cycle if self._stage == "body" else None  # a head has no cycle yet
        if coming is not None and self.pipeline and self.pipeline[0][0] is coming:
            self.pipeline.popleft()
        if due is None or (due is coming and not due.response_started):
            if error is not None and (coming is None or not coming.response_started):
                self._answer(error)
            if due is not None:
                due.disconnected = True
                due.message_event.set()
            self._close()
        else:
            last = self.pipeline[0][0] if self.pipeline else due
            last.keep_alive = False

    def _close(self) -> None:
        """Bytes that nobody reads would reset the connection before the client has read its answer."""
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _answer(self, error: HeadraceError) -> None:
        self.limits.refused(error.code)
        body = json_bytes(error.body())
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", b"req_" + secrets.token_hex(16).encode()),
            (b"connection", b"close"),
        ]
        head = b"".join(b"%b: %b\r\n" % pair for pair in headers)
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)


def protocol_class(limits: EdgeLimits) -> type[PodProtocol]:
    """For uvicorn's `Config(http=...)`."""
    return type("LimitedProtocol", (PodProtocol,), {"limits": limits})
