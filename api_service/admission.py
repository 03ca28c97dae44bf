"""The pod's own door: a permit for every request it carries, held for the life of the stream.

In: requests. Out: permits, or Overloaded at the limit. Room in the queue is Redis's to give (submit raises
QueueFull), and so is what a tenant may do (RateLimited).
"""

from __future__ import annotations

import asyncio

from shared.errors import Overloaded

__all__ = ["Admission", "Permit"]


class Permit:
    """Counts until released; releasing twice is harmless, so every path out may do it."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._release()


class Admission:
    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._active = 0
        self.idle = asyncio.Event()
        """Set while the pod carries nothing."""
        self.idle.set()

    @property
    def active(self) -> int:
        return self._active

    def admit(self) -> Permit:
        """Raises Overloaded with a retry time of one second: streams come and go."""
        if self._active >= self._max_streams:
            raise Overloaded(f"This server carries {self._active} requests, its limit. Retry soon.", retry_after=1.0)
        self._active += 1
        self.idle.clear()
        return Permit(self)

    def _release(self) -> None:
        self._active -= 1
        if self._active == 0:
            self.idle.set()
