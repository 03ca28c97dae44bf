"""How much slower than alone a busy program runs on this machine: time limits of tests grow with it.

In: nothing. Out: a factor that grows while a test runs, since others may begin to use the machine at any time.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

__all__ = ["Patience"]

_EVERY_S = 0.15
_SPIN = 12_000
"""Rounds of hashing: some milliseconds, without the interpreter's lock."""
_SPAN = 8
"""Probes of which one factor is made: about a second."""


class Patience:
    """`with Patience() as patience: assert took < 2.0 * patience`. The worst second since the block began counts."""

    def __init__(self) -> None:
        self._worst = 1.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def __float__(self) -> float:
        return self._worst

    def __mul__(self, seconds: float) -> float:
        return self._worst * seconds

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"{self._worst:.2f}"

    def _watch(self) -> None:
        recent: deque[tuple[float, float]] = deque(maxlen=_SPAN)
        while not self._stop.wait(_EVERY_S):
            recent.append(_probe())
            if len(recent) == _SPAN:
                wall, cpu = (sum(part) for part in zip(*recent, strict=True))
                self._worst = max(self._worst, wall / cpu)


def _probe() -> tuple[float, float]:
    """Wall time and CPU time of the same work."""
    began, cpu = time.monotonic(), time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"water", b"wheel", _SPIN)
    return time.monotonic() - began, time.thread_time() - cpu
