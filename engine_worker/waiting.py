"""How loops wait: for an event with a time limit, and between attempts with growing, jittered pauses."""

from __future__ import annotations

import asyncio
import random

__all__ = ["Backoff", "wait_for_event"]


async def wait_for_event(event: asyncio.Event, timeout: float) -> bool:
    """True when the event was set, False after `timeout` seconds without."""
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Backoff:
    """Doubling up to a bound, one per loop. `first` and `longest` in seconds."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._current = first

    def next(self) -> float:
        """Seconds to wait now; between half and the whole of the current step, so that workers do not march in line."""
        wait = self._current * random.uniform(0.5, 1.0)
        self._current = min(self._current * 2, self._longest)
        return wait

    def reset(self) -> None:
        self._current = self._first
