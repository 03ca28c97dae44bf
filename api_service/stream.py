"""What a relay task and an HTTP handler share of one request: records that have arrived and how it ended.

In: records from the relay. Out: the same, in order, to the handler. One event loop; the relay task writes, the
handler reads and waits on `wake`, which the disconnect watcher and the keep-alive clock set as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import HeadraceError, PodDraining, Use
from shared.limits import ANY, Terms
from shared.messages import GenerateRequest, Record

__all__ = ["Stream", "goes_on_elsewhere", "promise"]


class Stream:
    def __init__(self, request: GenerateRequest, *, owned: bool, terms: Terms = ANY) -> None:
        """`owned`: this pod got the request accepted, so it is the one that counts it; on these `terms`."""
        self.request = request
        self.terms = terms
        self.use: Use | None = None
        """Of the limits of its share, once it is accepted; None: it has none."""
        self.owned = owned
        self.raw: list[bytes] = []
        """Every record from seq 0, as it came: what is needed to queue the request again should Redis lose it."""
        self.ended = False
        """The terminal record has arrived."""
        self.error: HeadraceError | None = None
        """Set by the pod itself when it gives up on the stream; the request's own errors are in the terminal record."""
        self.left = False
        """The client has gone."""
        self.closed = False
        """Nobody here wants more of it."""
        self.direct: Callable[[Record], bool] | None = None
        """Offered a record while the handler waits: True, and it is done with without waking the handler."""
        self.wake_at = 1
        """So many records wake the handler; the last one always does."""
        self.wake = asyncio.Event()
        self._fresh: list[Record] = []

    @property
    def over(self) -> bool:
        return self.ended or self.closed or self.error is not None

    @property
    def last(self) -> int:
        """seq of the latest record, -1 before the first."""
        return len(self.raw) - 1

    def push(self, raw: bytes, record: Record) -> None:
        self.raw.append(raw)
        self.ended = record.end is not None
        if self.left:
            return
        fresh = self._fresh
        if self.direct is not None and not fresh and self.direct(record):
            return
        fresh.append(record)
        if self.ended or len(fresh) >= self.wake_at:
            self.wake.set()

    def take(self) -> list[Record]:
        """The records since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def fail(self, error: HeadraceError) -> None:
        if not self.over:
            self.error = error
            self.wake.set()

    def close(self) -> None:
        """Nobody here will read it."""
        self.closed = True


def promise() -> asyncio.Future[None]:
    """Of the running loop: what a stream is waited for with."""
    return asyncio.get_running_loop().create_future()


def goes_on_elsewhere(rid: str) -> PodDraining:
    """For a client whose pod is leaving: the request itself runs on."""
    message = f"This server is shutting down. Go on with GET /v1/streams/{rid} on another one."
    return PodDraining(message, retry_after=1.0)
