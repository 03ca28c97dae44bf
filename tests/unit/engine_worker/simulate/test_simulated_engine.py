"""What only the simulated engine does: its pace, answers that end by themselves, what it refuses."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from engine_worker.request import TokenEvent
from engine_worker.simulate.engine import SimulatedEngine
from engine_worker.simulate.tokens import TokenSource
from shared.errors import InvalidRequest
from shared.simulation import Simulation
from tests.support.requests import make_request

EOS = 2


class Timed:
    """An engine on a clock of its own; `said` has (seconds, event)."""

    def __init__(self, *, max_running: int = 500, **fields: float) -> None:
        self.now = 0.0
        self.said: list[tuple[float, TokenEvent]] = []
        self.engine = SimulatedEngine(
            Simulation(**fields),  # type: ignore[arg-type]
            TokenSource(range(3, 100), seed=0),
            max_running=max_running,
            max_request_tokens=2000,
            vocab_size=100,
            eos_token_ids=(EOS,),
            clock=lambda: self.now,
            wait=self._wait,
        )

    def _wait(self, seconds: float) -> None:
        self.now += seconds

    def run(self, until: float = 1e9) -> Timed:
        while self.engine.has_work and self.now < until:
            self.said += [(self.now, event) for event in self.engine.step()]
        return self

    def times(self, request_id: str) -> list[float]:
        return [at for at, event in self.said if event.request_id == request_id]


def test_all_streams_together_keep_the_total_rate() -> None:
    timed = Timed(tokens_per_s=5000)
    for i in range(500):
        timed.engine.add(make_request(3, 50, request_id=f"r{i}/0"))
    timed.run()
    assert len(timed.said) == 25_000
    assert timed.now == pytest.approx(5.0, rel=0.02)
    times = timed.times("r7/0")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) < 0.12
    assert min(gaps) > 0.08


def test_one_stream_is_no_faster_than_its_own_rate() -> None:
    timed = Timed(tokens_per_s=5000, stream_tokens_per_s=20)
    timed.engine.add(make_request(3, 40, request_id="a/0"))
    timed.run()
    assert timed.now == pytest.approx(2.0, rel=0.02)


def test_the_first_token_takes_its_time_from_the_moment_there_is_a_seat() -> None:
    timed = Timed(tokens_per_s=1000, ttft_ms=300, max_running=1)
    for name in ("a/0", "b/0"):
        timed.engine.add(make_request(3, 10, request_id=name))
    timed.run()
    assert timed.times("a/0")[0] == pytest.approx(0.3, abs=0.01)
    assert timed.times("b/0")[0] == pytest.approx(timed.times("a/0")[-1] + 0.3, abs=0.01)
    assert len(timed.times("b/0")) == 10


def test_answers_end_by_themselves_only_where_that_is_allowed() -> None:
    timed = Timed(tokens_per_s=1000, answer_tokens=20)
    for i in range(50):
        timed.engine.add(make_request(3 + i, 500, request_id=f"r{i}/0", stop=[EOS]))
    timed.engine.add(make_request(3, 100, request_id="ignores/0"))
    timed.engine.add(make_request(3, 100, request_id="long/0", stop=[EOS], min_tokens=90))
    timed.run()
    lengths = [len(timed.times(f"r{i}/0")) - 1 for i in range(50)]
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(set(lengths)) > 5
    ends = {event.request_id: event for _, event in timed.said if event.finish_reason}
    assert {(ends[f"r{i}/0"].finish_reason, ends[f"r{i}/0"].stop_token_id) for i in range(50)} == {("stop", EOS)}
    assert (ends["ignores/0"].finish_reason, len(timed.times("ignores/0"))) == ("length", 100)
    assert (ends["long/0"].finish_reason, len(timed.times("long/0"))) == ("stop", 91)


def test_the_cache_it_shows_fills_with_tokens() -> None:
    timed = Timed(tokens_per_s=1000)
    timed.engine.add(make_request([5] * 100, 50, request_id="a/0"))
    timed.run(until=0.02)
    stats = timed.engine.stats()
    assert (stats.running, stats.waiting) == (1, 0)
    assert stats.blocks_used == -(-(100 + len(timed.said)) // 16)
    assert stats.blocks_total == 500 * 125


@pytest.mark.parametrize("what", ["embedding", "prompt_logprobs"])
def test_what_only_a_model_can_compute_is_refused(what: str) -> None:
    request = make_request(3, 1, **({"prompt_logprobs": 1} if what == "prompt_logprobs" else {}))
    if what == "embedding":
        request.pooling = "last"
    with pytest.raises(InvalidRequest, match="only simulates a model"):
        Timed(tokens_per_s=10).engine.add(request)


def test_a_waiting_step_ends_as_soon_as_something_arrives() -> None:
    engine = SimulatedEngine(
        Simulation(stream_tokens_per_s=0.1, ttft_ms=60_000),
        TokenSource(range(3, 100), seed=0),
        max_running=4,
        max_request_tokens=100,
        vocab_size=100,
    )
    engine.add(make_request(3, 5, request_id="a/0"))
    engine.step()
    waiting = threading.Thread(target=engine.step)
    started = time.monotonic()
    waiting.start()
    engine.abort("a/0")
    waiting.join(30)
    assert not waiting.is_alive()
    assert [event.finish_reason for event in engine.step()] in (["abort"], [])
    assert not engine.has_work
    assert time.monotonic() - started < 30
