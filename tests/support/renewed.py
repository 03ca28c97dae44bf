"""What several tests stand on, made anew after one that failed: a second try is then a first one, and the next test
does not fail for what another left behind.

In: how it is made. Out: a holder for a module's or a session's fixture; the fixture that tests ask for returns `get()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Generic, TypeVar

import pytest

__all__ = ["Renewed", "renewing", "spoil_what_failed"]

T = TypeVar("T")


class Renewed(Generic[T]):
    """Made when first asked for, and again when asked for once spoilt."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._open = ExitStack()
        self._held: list[T] = []
        self.spoilt = False
        """A test that used it has failed: whatever it is in now, nobody else gets it."""

    def get(self) -> T:
        if self.spoilt:
            self.close()
        if not self._held:
            self._held.append(self._open.enter_context(self._make()))
        return self._held[0]

    def close(self) -> None:
        """Ends it. May be called twice."""
        self.spoilt = False
        self._held.clear()
        self._open.close()


def renewing(make: Callable[[], AbstractContextManager[T]]) -> Iterator[Renewed[T]]:
    """Body of the fixture that holds it: `yield from renewing(make)`."""
    renewed = Renewed(make)
    yield renewed
    renewed.close()


def spoil_what_failed(item: pytest.Item) -> None:
    """Everything renewable that this test used."""
    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, Renewed):
            value.spoilt = True
