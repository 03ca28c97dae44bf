"""The pace of made-up tokens against plain arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.simulate.pace import Pace
from shared.simulation import Simulation


def drive(simulation: Simulation, streams: int, seconds: float, tick: float) -> int:
    """Rounds that come in `seconds` when somebody looks every `tick`."""
    pace, now, rounds = Pace(simulation), 100.0, 0
    pace.rounds(0, now)
    while now < 100.0 + seconds:
        now += tick
        rounds += pace.rounds(streams, now)
    return rounds


@given(
    streams=st.integers(1, 500),
    total=st.floats(10, 10_000),
    each=st.floats(1, 500),
    tick=st.sampled_from([0.001, 0.01, 0.1]),
)
def test_the_slower_of_the_two_rates_holds_over_time(streams: int, total: float, each: float, tick: float) -> None:
    rate = min(total / streams, each)
    if rate * tick > 60:  # faster than one look can give
        return
    rounds = drive(Simulation(total, each), streams, 20.0, tick)
    assert rounds == pytest.approx(rate * 20, abs=2 + rate * tick)


def test_nothing_is_due_at_once_and_a_pause_is_not_made_up_for() -> None:
    pace = Pace(Simulation(tokens_per_s=100))
    assert pace.rounds(0, 5.0) == 0
    assert pace.rounds(10, 5.0) == 0
    assert pace.wait(10, 5.0) == pytest.approx(0.1)
    assert pace.rounds(10, 5.11) == 1
    assert pace.rounds(0, 60.0) == 0  # idle for a minute
    assert pace.rounds(10, 60.11) == 1


def test_a_machine_that_falls_behind_catches_up_half_a_second_and_no_more() -> None:
    pace = Pace(Simulation(tokens_per_s=100))
    pace.rounds(0, 0.0)
    assert pace.rounds(10, 30.0) in (5, 6)  # as the division turns out
    slow = Pace(Simulation(stream_tokens_per_s=0.5))
    slow.rounds(0, 0.0)
    assert [slow.rounds(1, now) for now in (1.0, 2.1, 3.0, 4.1)] == [0, 1, 0, 1]
