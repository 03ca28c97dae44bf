"""Who fills the seats of this worker, and whose sequences give way: so that who wants little begins at once.

In: the outbox's jobs. Out: shares that have their part of the seats already. What they get beyond it yields, as batch
work does: it runs while seats are free and loses them to whoever has fewer. Fair turns alone decide about the next free
seat only; without this a tenant that sends much would sit on all of them, and the others would wait for one to end.
"""

from __future__ import annotations

import time
from collections import Counter

from engine_worker.outbox import Outbox

__all__ = ["Crowd"]

_REMEMBER_S = 30.0
"""A share counts as active for so long after it was last seen. One that is alone has every seat for itself."""


class Crowd:
    """Of interactive requests only: batch work yields anyway."""

    def __init__(self, outbox: Outbox, slots: int) -> None:
        self._outbox = outbox
        self._slots = slots
        self._seen: dict[str, float] = {}

    def has_many(self) -> list[str]:
        """Shares that sit on their part of the seats or more; none while one share is alone."""
        seats = self._seated()
        now = time.monotonic()
        self._seen |= dict.fromkeys(seats, now)
        self._seen = {share: at for share, at in self._seen.items() if now - at < _REMEMBER_S}
        if len(self._seen) < 2:
            return []
        part = -(-self._slots // len(self._seen))
        return [share for share, count in seats.items() if count >= part]

    def _seated(self) -> Counter[str]:
        """Choices that do not yield, by share."""
        seats: Counter[str] = Counter()
        for job in self._outbox.jobs.values():
            if not job.yields:
                seats[job.request.share] += len(job.open_choices())
        return seats
