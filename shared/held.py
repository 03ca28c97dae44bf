"""What this worker process holds, and the quarantine that keeps a suspect alone until it has proved itself.

In: acquisitions and first records. Out: what may be started now. Owned by ClaimQueue; one event loop, no awaits
between a check and its consequence.
"""

from __future__ import annotations

import asyncio
import time

__all__ = ["HeldRequests"]

_LOST_MAX = 100


class HeldRequests:
    """A request is unproved from acquire until its first committed record. A suspect is one that an earlier worker lost
    unproved: while there is one, nothing else may become unproved, so a death convicts it alone.

    One object per process: the queues of several shards share it."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._unproved: set[str] = set()
        self._suspects: set[str] = set()
        self.suspects_wait = False
        """Suspects were seen in the queue; whoever finds nothing unproved here should take one."""
        self.newcomers_turn = False
        """The last one that was taken in was a suspect."""
        self._lost: dict[str, float] = {}
        self._closed_until = 0.0
        self._changed = asyncio.Event()

    def __contains__(self, rid: str) -> bool:
        return rid in self._epochs

    def ids(self) -> list[str]:
        """Requests that it holds or is about to acquire."""
        return list(self._epochs)

    @property
    def unproved(self) -> bool:
        return bool(self._unproved)

    @property
    def clearing(self) -> bool:
        """Whether a suspect waits for what is unproved, and nothing new is let in meanwhile."""
        return self.unproved and time.monotonic() < self._closed_until

    def may_start(self, rid: str) -> bool:
        """Whether this request may become unproved now."""
        return not self._suspects or rid in self._suspects

    def reserve(self, rid: str) -> None:
        """Before an acquire is sent: from now on it counts as unproved and cannot be acquired by another task."""
        self._epochs[rid] = 0
        self._unproved.add(rid)

    def acquired(self, rid: str, epoch: int, tries: int) -> None:
        """After it; `tries` as replied (1 = nobody lost it before)."""
        self._epochs[rid] = epoch
        if tries > 1:
            self._suspects.add(rid)

    def prove(self, rid: str) -> None:
        """After a committed record."""
        if rid in self._unproved or rid in self._suspects:  # not so for most tokens
            self._unproved.discard(rid)
            self._suspects.discard(rid)
            self._changed.set()

    def drop(self, rid: str, epoch: int = 0) -> None:
        """Ended, fenced, handed back or gone: the acquisition `epoch`, not a newer one. 0 = a reservation."""
        if self._epochs.get(rid) == epoch:
            del self._epochs[rid]
            self.prove(rid)

    def lose(self, rid: str, seconds: float) -> None:
        """Another worker took it from this one, which was silent: for so long others come first."""
        self._lost.pop(rid, None)
        self._lost[rid] = time.monotonic() + seconds
        if len(self._lost) > _LOST_MAX:
            del self._lost[next(iter(self._lost))]

    def lost(self) -> list[str]:
        """What others should take rather than this worker."""
        now = time.monotonic()
        self._lost = {rid: until for rid, until in self._lost.items() if until > now}
        return list(self._lost)

    def make_room(self, seconds: float) -> None:
        """A suspect waits until nothing is unproved: let nothing new in for so long, or it waits for ever."""
        self._closed_until = time.monotonic() + seconds

    def open(self) -> None:
        """No suspect waits any more."""
        self.suspects_wait = False
        self._closed_until = 0.0
        self._changed.set()

    def expect(self, rid: str) -> None:
        """A suspect was taken over and will be acquired."""
        self._suspects.add(rid)

    def forget(self, rid: str) -> None:
        """An expected suspect that was not acquired after all."""
        if rid not in self._epochs:
            self.prove(rid)

    async def wait_open(self, timeout: float) -> bool:
        """True as soon as new requests may be taken in, False after `timeout` seconds without."""
        deadline = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            clearing = self.clearing
            if not self._suspects and not clearing:
                return True
            if now >= deadline:
                return False
            self._changed.clear()
            wait_until = min(deadline, self._closed_until) if clearing and not self._suspects else deadline
            try:
                async with asyncio.timeout(wait_until - now):
                    await self._changed.wait()
            except TimeoutError:
                continue
