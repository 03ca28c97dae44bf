"""What this worker process holds, and the quarantine that keeps a suspect alone until it has proved itself.

In: acquisitions and first records. Out: whether new requests may be taken in. Owned by ClaimQueue; one event loop.
"""

from __future__ import annotations

import asyncio
import time

__all__ = ["HeldRequests"]


class HeldRequests:
    """A request is unproved from acquire until its first committed record. A suspect is one that an earlier worker lost
    unproved: while there is one, nothing else may become unproved, so a death convicts it alone."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._unproved: set[str] = set()
        self._suspects: set[str] = set()
        self._hold_until = 0.0
        self._changed = asyncio.Event()

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    @property
    def quarantined(self) -> bool:
        """A suspect is running: take nothing in."""
        return bool(self._suspects)

    @property
    def unproved(self) -> bool:
        return bool(self._unproved)

    def add(self, rid: str, tries: int) -> None:
        """After an acquire; `tries` as it replied (1 = nobody lost it before)."""
        self._held.add(rid)
        self._unproved.add(rid)
        if tries > 1:
            self._suspects.add(rid)

    def prove(self, rid: str) -> None:
        """After a committed record."""
        self._unproved.discard(rid)
        self._suspects.discard(rid)
        self._changed.set()

    def drop(self, rid: str) -> None:
        """Ended, fenced, handed back or gone."""
        self._held.discard(rid)
        self.prove(rid)

    def hold(self, seconds: float) -> None:
        """A suspect waits for the unproved ones to clear: let nothing new in for so long, or it would wait for ever."""
        self._hold_until = time.monotonic() + seconds

    def release_hold(self) -> None:
        self._hold_until = 0.0

    async def wait_open(self, timeout: float) -> bool:
        """True as soon as new requests may be taken in, False after `timeout` seconds without."""
        deadline = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            held_back = self.unproved and now < self._hold_until
            if not self.quarantined and not held_back:
                return True
            if now >= deadline:
                return False
            self._changed.clear()
            try:
                async with asyncio.timeout(min(deadline, self._hold_until if held_back else deadline) - now):
                    await self._changed.wait()
            except TimeoutError:
                continue
