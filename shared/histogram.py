"""A histogram of seconds: counts by bucket and their sum, monotone since start. A worker's travel in its card."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["BOUNDS", "SecondsHistogram"]

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets, inclusive; one more bucket is above all. The same in every process of one version."""


class SecondsHistogram:
    """`bounds`: upper bounds of the buckets, ascending."""

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        seconds = max(0.0, seconds)  # clocks of two machines differ
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def values(self) -> tuple[float, ...]:
        """Count of each bucket, then the sum of all."""
        return (*map(float, self._counts), self._sum)
