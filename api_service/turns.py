"""One request begins in each round of the event loop, in the order of arrival, however many bodies come at once.

In: requests whose body is in. Out: their turn. Without it all of a crowd would be parsed before the first of them is
queued, because replies of Redis are only looked at between rounds: workers would stand idle meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turns"]


class Turns:
    """Of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False
        """Whether this round's turn is gone."""

    async def take(self) -> None:
        """Returns at once when nobody has begun in this round."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next, loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else the request was cancelled
                turn.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._taken = False
