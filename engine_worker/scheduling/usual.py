"""How long a step of interactive requests takes on their own: what their streams are used to.

In: one time per step, with the number of streams that waited for it. Out: a little more than the mean gap of the last
steps. Batch work may fill shorter steps up to it: that moves the median of the gaps between tokens, while those of
steps that hold a prompt, which the slowest twentieth are, stay longer than it.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Usual"]

_STEPS = 256
"""Remembered: some seconds, so that a stream that is alone now is not measured by the crowd of a minute ago."""
_STRETCH = 1.15
"""Times the mean. A mean hardly moves where a quantile jumps: from steps without a prompt to those with one. Longer
steps let more streams and prompts meet, so what is allowed here comes back as slower steps with prompts."""
_QUANTILE = 0.95
"""Where all steps take the same, none is to take longer than this one."""
_REFRESH_EVERY = 8


class Usual:
    """Knows nothing until some steps were added: then `seconds` is 0."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS)
        self._fresh = 0
        self.seconds = 0.0
        """That a step may take with batch work in it."""

    def add(self, seconds: float, streams: int) -> None:
        """A step that would take so long without batch work, and give a token to so many (>= 1) streams."""
        self._steps.append((seconds, streams))
        self._fresh += 1
        if self._fresh == _REFRESH_EVERY:
            self._fresh = 0
            self.seconds = self._measure()

    def _measure(self) -> float:
        gaps = sum(streams for _, streams in self._steps)
        stretched = _STRETCH * sum(seconds * streams for seconds, streams in self._steps) / gaps
        left = _QUANTILE * gaps
        for seconds, streams in sorted(self._steps):
            left -= streams
            if left <= 0:
                return min(seconds, stretched)
        return stretched
