"""A client that has shut down its sending side: does it still listen, or has it left? TCP says the same of both.

In: a connection and the request that is due on it. Out: now and then a few bytes that a listening client passes over. A
closed socket answers them with a reset, and the next ones end the connection like any other loss. HTTP/1.0 knows no
bytes that may come before an answer: there the system asks, but that is answered for a closed socket too, for a minute.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from api_service.body_writer import BODY_WRITER, BodyWriter

__all__ = ["Probing"]

_FIRST_S, _LAST_S = 0.02, 2.0
"""Time before the first probe and most between two, each pause twice the one before: quick answers need none, and who
left is found out at the second."""
_QUICK_S, _UNANSWERED_S = 0.1, 10.0
"""Before the answer, pauses that would be longer than the one become the other: some clients bear only five answers
before the answer."""
_UNHEARD_MS = 20_000
"""A client that acknowledges nothing for so long is gone: behind a firewall nobody sends resets."""
_ASK_S = 5
"""Between two questions of the system's."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An answer before the answer, which every client of HTTP/1.1 has to pass over."""


class Probing:
    """Of one connection, from `start` until `stop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        due: Callable[[], RequestResponseCycle | None],
    ) -> None:
        """`due`: the request that is being answered, as long as one is."""
        self._loop = loop
        self._transport = transport
        self._connection = transport.get_extra_info("socket")
        self._due = due
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._connection.family in (socket.AF_INET, socket.AF_INET6):
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            options = {"TCP_USER_TIMEOUT": _UNHEARD_MS, "TCP_KEEPIDLE": _ASK_S, "TCP_KEEPINTVL": _ASK_S}
            for name, value in options.items():
                if hasattr(socket, name):
                    self._connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._again(_FIRST_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _again(self, pause_s: float) -> None:
        self._timer = self._loop.call_later(pause_s, self._probe, pause_s)

    def _probe(self, pause_s: float) -> None:
        if self._transport.is_closing():
            return
        # A loss that the system knows of: nobody reads from this connection any more, so nothing else would tell.
        if self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        cycle, next_s = self._due(), min(2 * pause_s, _LAST_S)
        writes = cycle is not None and (cycle.response_started or cycle.scope["http_version"] == "1.1")
        if cycle is not None and writes and not cycle.flow.write_paused:
            if cycle.response_started:
                body: BodyWriter = cycle.scope["state"][BODY_WRITER]
                body.probe()
            else:
                self._transport.write(_CONTINUE)
        if writes and cycle is not None and not cycle.response_started and next_s > _QUICK_S:
            next_s = _UNANSWERED_S
        self._again(next_s)
