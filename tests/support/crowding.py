"""How much slower than alone a busy program runs on this machine now: time limits of tests grow with it."""

from __future__ import annotations

import time

__all__ = ["crowding"]

_SPIN_S = 0.1


def crowding() -> float:
    """Wall time of a short busy loop over its CPU time: 1.0 on a machine with a free core. Blocks for as long."""
    began, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < _SPIN_S:
        pass
    return max(1.0, (time.monotonic() - began) / _SPIN_S)
