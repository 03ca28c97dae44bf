"""Waiting for conditions instead of sleeping: a test goes on as soon as one holds, and fails at its deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["eventually", "eventually_sync"]

_T = TypeVar("_T")


async def eventually(
    condition: Callable[[], _T | Awaitable[_T]], timeout: float = 10.0, *, interval: float = 0.01, what: str = ""
) -> _T:
    """The first true value of `condition` (plain or async); AssertionError with the last after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        value: _T = await result if inspect.isawaitable(result) else result  # type: ignore[assignment]
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition} (last value {value!r})")
        await asyncio.sleep(interval)


def eventually_sync(
    condition: Callable[[], _T], timeout: float = 10.0, *, interval: float = 0.01, what: str = ""
) -> _T:
    """The same for tests without an event loop."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition} (last value {value!r})")
        time.sleep(interval)
