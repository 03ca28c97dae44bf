"""Runs a batch so that a row that raises fails alone. Rows are independent: parts of a batch give the same results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine_worker.plan import ScheduledRequest
from engine_worker.runner.measure import Measured
from engine_worker.sampling.sampler import SampledToken

__all__ = ["Compute", "Outcome", "RowFailure", "RowResult", "run_isolated"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowFailure:
    """This row raised even when computed alone."""

    error: Exception


class RowResult(NamedTuple):
    """This row was computed. A tuple because each running request makes one in every step."""

    sampled: SampledToken | None = None
    """None: it draws no token yet."""
    measured: Measured | None = None
    """What it wanted to know of its prompt."""


Outcome = RowResult | RowFailure

Compute = Callable[[Sequence[ScheduledRequest]], list[Outcome]]


def run_isolated(rows: Sequence[ScheduledRequest], compute: Compute) -> list[Outcome]:
    """`compute(rows)`, or, when that raises, of each half on its own, down to the rows that raise alone.

    One guilty row among n costs about 2 log2(n) further passes, once: it ends with this step.
    """
    try:
        return compute(rows)
    # Deliberately broad: whatever a row provokes must not reach its neighbours. The engine judges whether it is a row.
    except Exception as error:  # noqa: BLE001
        if len(rows) == 1:
            _log.exception("request %s cannot be computed", rows[0].request_id)
            return [RowFailure(error)]
        _log.warning("a step of %d requests failed (%r), looking for the one that causes it", len(rows), error)
    half = len(rows) // 2
    return run_isolated(rows[:half], compute) + run_isolated(rows[half:], compute)
