"""Random numbers by counter: those of a draw are a function of (seed, output position) and of nothing else.

So it does not matter in which batch, at which row, on which worker or after how many preemptions a token is drawn.
Integer arithmetic of our own (numpy, modulo 2^64), so that no library version changes the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["mix64", "uniform"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TO_UNIT = 2.0**-53


def mix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea, Flood 2014; constants of Stafford's variant 13)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def uniform(seeds: Sequence[int], positions: Sequence[int], count: int = 1) -> NDArray[np.float64]:
    """`count` numbers of [0, 1) with 53 random bits per (seed, output position) -> [R, count].

    Seeds are unsigned 64-bit; more numbers begin with those of a smaller count.

    The seed is mixed first: choices of one request have seeds that differ by splitmix64's own increment, and would walk
    through the same sequence one step apart otherwise.
    """
    state = mix64(np.array(seeds, dtype=np.uint64) + _GOLDEN)
    state = mix64(state + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    further = mix64(state[:, None] + np.arange(1, count, dtype=np.uint64) * _GOLDEN)
    return (np.hstack([state[:, None], further]) >> np.uint64(11)).astype(np.float64) * _TO_UNIT
