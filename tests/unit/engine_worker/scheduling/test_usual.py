"""What streams are used to, of steps whose times are given."""

from __future__ import annotations

import pytest

from engine_worker.scheduling.usual import Usual


def usual(*steps: tuple[float, int]) -> float:
    """Seconds after all these steps, eight times over: it is measured every few steps."""
    measured = Usual()
    for _ in range(8):
        for step in steps:
            measured.add(*step)
    return measured.seconds


def test_it_knows_nothing_at_first() -> None:
    assert Usual().seconds == 0.0


def test_it_lies_between_steps_without_and_with_a_prompt() -> None:
    # Four in five steps take 10 ms, the others 40: 16 ms on average.
    assert usual(*[(0.01, 3)] * 4, (0.04, 3)) == pytest.approx(1.15 * 0.016)


def test_it_hardly_moves_with_the_share_of_steps_with_a_prompt() -> None:
    """A quantile would jump from one kind of step to the other."""
    seldom, often = usual(*[(0.01, 1)] * 31, *[(0.04, 1)] * 9), usual(*[(0.01, 1)] * 29, *[(0.04, 1)] * 11)
    assert often / seldom < 1.1


def test_a_step_counts_for_every_stream_that_waited_for_it() -> None:
    assert usual((0.01, 1), (0.03, 3)) == pytest.approx(1.15 * 0.025)


def test_where_all_steps_are_alike_none_is_to_take_longer() -> None:
    assert usual((0.01, 2)) == 0.01


def test_seldom_slow_steps_are_no_measure() -> None:
    assert usual(*[(0.01, 1)] * 30, (0.5, 1)) == 0.01
