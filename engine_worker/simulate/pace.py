"""When the next tokens are due: one a stream and round, as a batch of that size would take on the simulated machine.

In: how many streams take part, and the time. Out: rounds that are due, seconds until the next. No clock of its own.
"""

from __future__ import annotations

from shared.simulation import Simulation

__all__ = ["Pace"]

_MAX_ROUNDS = 64
_DEBT_S = 0.5
"""Lost time beyond one round's that is made up for: a machine too slow for the pace runs up no endless burst."""
_SHORTEST_WAIT_S = 0.001
"""Rounds closer together than this come several at once."""


class Pace:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._paid = 0.0
        """Rounds are given up to this time."""

    def rounds(self, streams: int, now: float) -> int:
        """Rounds to give now, in which each of `streams` gets one token; 0 when none is due."""
        if not streams:
            self._paid = now
            return 0
        interval = self._interval(streams)
        self._paid = max(self._paid, now - interval - _DEBT_S)
        due = min(int((now - self._paid) / interval), _MAX_ROUNDS)
        self._paid += due * interval
        return due

    def wait(self, streams: int, now: float) -> float:
        """Seconds until `streams` have a round due."""
        return max(_SHORTEST_WAIT_S, self._paid + self._interval(streams) - now)

    def _interval(self, streams: int) -> float:
        return max(streams / self._simulation.tokens_per_s, 1 / self._simulation.stream_tokens_per_s)
