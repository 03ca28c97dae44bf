"""A client that has shut down its sending side: does it still listen, or has it left? TCP says the same of both.

In: a connection and the request that is due on it. Out: now and then a few bytes that a listening client passes over. A
closed socket answers them with a reset, and the next ones end the connection like any other loss.
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
        self._due = due
        self._timer: asyncio.TimerHandle | None = None

    @staticmethod
    def possible(cycle: RequestResponseCycle) -> bool:
        """HTTP/1.0 has nothing to probe with before the answer."""
        return cycle.scope["http_version"] == "1.1"

    def start(self) -> None:
        connection = self._transport.get_extra_info("socket")
        if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
        self._again(_FIRST_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _again(self, pause_s: float) -> None:
        self._timer = self._loop.call_later(pause_s, self._probe, pause_s)

    def _probe(self, pause_s: float) -> None:
        if self._transport.is_closing():
            return
        cycle, next_s = self._due(), min(2 * pause_s, _LAST_S)
        if cycle is not None and not cycle.response_started and next_s > _QUICK_S:
            next_s = _UNANSWERED_S
        if cycle is not None and not cycle.flow.write_paused:
            body: BodyWriter = cycle.scope["state"][BODY_WRITER]
            if cycle.response_started:
                body.probe()
            elif self.possible(cycle):
                self._transport.write(_CONTINUE)
        self._again(next_s)
