"""The arithmetic of pauses: two streams of a dead worker, taken over together, one after the other."""

from __future__ import annotations

from tests.support.chaos_pauses import Pause, TakeOver, describe, find_pauses
from tests.support.stream_client import Outcome


def outcome(rid: str, *arrivals: float) -> Outcome:
    return Outcome(rid=rid, arrivals=list(arrivals), spoke_at=arrivals[0])


def test_a_pause_is_the_sum_of_its_parts() -> None:
    streams = [outcome("a", 9.0, 10.0, 13.0, 13.1), outcome("b", 9.0, 9.5, 14.0)]
    taken = [TakeOver("a", 1, 12.0, 1), TakeOver("b", 1, 12.5, 2)]
    a, b = find_pauses(streams, [("pod", 9.2), ("worker", 10.5)], taken)
    assert a == Pause("a", 2.5, 1.5, 1.0, 0.0, 2, 1)
    assert b == Pause("b", 3.5, 2.0, 1.5, 0.5, 2, 2)
    assert "b: 3.50 s = 2.00 + 0.50 + 1.00, one of 2 taken over together, tries 2" in describe([a, b])


def test_what_redis_or_a_first_token_delayed_does_not_count_and_two_deaths_share_a_pause() -> None:
    redis = outcome("a", 1.0, 5.0)
    silent = Outcome(rid="b", arrivals=[1.0, 5.0], spoke_at=5.0)
    assert find_pauses([redis, silent], [("redis", 2.0), ("worker", 3.0)], []) == []
    [twice] = find_pauses([outcome("c", 1.0, 7.0)], [("worker", 2.0), ("worker", 4.0)], [])
    assert twice == Pause("c", 2.5)
