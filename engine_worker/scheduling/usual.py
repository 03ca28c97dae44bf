"""How long the slower steps of interactive requests take on their own: what their streams are used to.

In: one time per step, with the number of streams that waited for it. Out: a quantile over the last steps. Batch work
may fill shorter steps up to it: that moves the median of the gaps between tokens, not what the slowest twentieth is.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Usual"]

_STEPS = 256
"""Remembered: some seconds, so that a stream that is alone now is not measured by the crowd of a minute ago."""
_QUANTILE = 0.75
"""Well below the 95th percentile that is to stay as it was: longer steps also let more streams and prompts meet."""
_REFRESH_EVERY = 8


class Usual:
    """Knows nothing until some steps were added: then `seconds` is 0."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS)
        self._fresh = 0
        self.seconds = 0.0
        """Of the step that three in four gaps are not longer than."""

    def add(self, seconds: float, streams: int) -> None:
        """A step that would take so long without batch work, and give a token to so many (>= 1) streams."""
        self._steps.append((seconds, streams))
        self._fresh += 1
        if self._fresh == _REFRESH_EVERY:
            self._fresh = 0
            self.seconds = self._quantile()

    def _quantile(self) -> float:
        left = _QUANTILE * sum(streams for _, streams in self._steps)
        for seconds, streams in sorted(self._steps):
            left -= streams
            if left <= 0:
                return seconds
        return 0.0
