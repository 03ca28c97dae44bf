"""One definition of a percentile, for every benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["percentile"]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the neighbours; `share` 0 to 1. NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
