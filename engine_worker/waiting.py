"""How loops wait: for an event with a time limit, and between attempts with growing, jittered pauses."""

from __future__ import annotations

import asyncio
import random

from redis.exceptions import RedisError

from shared.connections import REDIS_DOWN

__all__ = ["REDIS_TROUBLE", "Backoff", "wait_for_event"]

REDIS_TROUBLE: tuple[type[Exception], ...] = (RedisError, *REDIS_DOWN)
"""What a loop lives through: Redis away, or an answer nobody expected. Both are logged and tried again, because every
script bears repetition and a worker that ends would meet the same answer after its restart."""


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
        self._failing = False

    @property
    def failing(self) -> bool:
        """Whether an attempt has failed since the last success: say it once, not with every attempt."""
        return self._failing

    def next(self) -> float:
        """Seconds to wait now; between half and the whole of the current step, so that workers do not march in line."""
        self._failing = True
        wait = self._current * random.uniform(0.5, 1.0)
        self._current = min(self._current * 2, self._longest)
        return wait

    def reset(self) -> None:
        """After a success."""
        self._current, self._failing = self._first, False
