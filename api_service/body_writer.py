"""Pieces of a body without ASGI: what the protocol offers each request, for answers that are written token by token.

In: the request's cycle in the HTTP protocol. Out: chunks on its connection, or word that `send` must take them.
"""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["BODY_WRITER", "BodyWriter"]

BODY_WRITER: Final = "body_writer"
"""Where a request's `state` holds its `BodyWriter`; nowhere under another server."""


class BodyWriter:
    """Pieces of one chunked body, straight to the connection: no message, no call of middleware and no switch of tasks
    for every token of every stream. Beginning and end go through ASGI's `send`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write
        self.comment = b""
        """What may stand between two pieces and says nothing; b"" where there is no such thing."""

    @property
    def ready(self) -> bool:
        """Whether a piece may be written now. Else `send` knows what to do: wait for the client, or drop it."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            self._flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def probe(self) -> None:
        """Says nothing, where that can be said, to see whether somebody is there."""
        if self.comment and self.ready:
            self.write(self.comment)

    def write(self, data: bytes) -> None:
        """Only when `ready`, and never empty: that would be the end of the body."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
