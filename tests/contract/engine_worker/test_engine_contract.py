"""One suite for every engine a worker can run: a model's, and the one that only simulates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_worker.interface import ServingEngine
from engine_worker.models.base import LoadedModel
from engine_worker.request import Request
from engine_worker.simulate.engine import SimulatedEngine
from engine_worker.simulate.tokens import TokenSource
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.simulation import Simulation
from tests.support.engines import engine_for
from tests.support.requests import make_request

VOCABULARY = 320
WINDOW = 64
Make = Callable[[], ServingEngine]


class Clock:
    """Seconds pass only while somebody waits for them."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def simulated(text_tokens: range = range(3, VOCABULARY), **fields: float) -> SimulatedEngine:
    clock = Clock()
    return SimulatedEngine(
        Simulation(**({"tokens_per_s": 100.0} | fields)),  # type: ignore[arg-type]
        TokenSource(text_tokens, seed=0),
        max_running=4,
        max_request_tokens=WINDOW,
        vocab_size=VOCABULARY,
        eos_token_ids=(2,),
        clock=clock,
        wait=clock.wait,
    )


@pytest.fixture(params=["model", "simulated"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "simulated":
        return simulated
    tiny: LoadedModel = request.getfixturevalue("tiny")
    return lambda: engine_for(tiny, max_num_seqs=4, max_model_len=WINDOW)


class Run:
    """What the events said of each request."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.stops: dict[str, int | None] = {}

    def step(self) -> None:
        for event in self.engine.step():
            assert event.request_id not in self.ends, "an event after the end"
            if event.token_id is not None:
                self.tokens.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event.finish_reason
                self.stops[event.request_id] = event.stop_token_id

    def finish(self, steps: int = 10_000) -> Run:
        for _ in range(steps):
            if not self.engine.has_work:
                return self
            self.step()
        raise AssertionError("it has not finished")

    def add(self, *requests: Request) -> Run:
        for request in requests:
            self.engine.add(request)
        return self

    def of(self, request: Request) -> tuple[list[int], str]:
        return self.tokens.get(request.request_id, []), self.ends[request.request_id]


def test_an_answer_has_max_tokens_tokens_and_one_end(make: Make) -> None:
    requests = [make_request(5 + i, max_tokens=3 + i) for i in range(8)]
    run = Run(make()).add(*requests).finish()
    for request in requests:
        tokens, end = run.of(request)
        assert (len(tokens), end) == (request.max_tokens, "length")
    stats = run.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.counters["generation_tokens"] == sum(request.max_tokens for request in requests)
    assert stats.counters["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in requests)


def test_the_same_request_has_the_same_answer_in_any_company(make: Make) -> None:
    alone = Run(make()).add(one := make_request(7, 10, seed=5, temperature=1.0)).finish().of(one)
    crowd = [make_request(i + 1, 9, seed=i, temperature=1.0) for i in range(6)]
    again = make_request(7, 10, seed=5, temperature=1.0)
    assert Run(make()).add(*crowd[:3], again, *crowd[3:]).finish().of(again) == alone
    other = make_request(7, 10, seed=6, temperature=1.0)
    assert Run(make()).add(other).finish().of(other) != alone


def test_a_take_over_goes_on_where_the_log_ends(make: Make) -> None:
    whole, _ = Run(make()).add(one := make_request(7, 10, seed=5, temperature=1.0)).finish().of(one)
    for logged in (1, 6, 9):
        rest = make_request(7, 10, seed=5, temperature=1.0, output=whole[:logged])
        assert Run(make()).add(rest).finish().of(rest) == (whole[logged:], "length")
    done = make_request(7, 10, seed=5, temperature=1.0, output=whole)
    assert Run(make()).add(done).finish().of(done) == ([], "length")


def test_a_stop_token_ends_the_answer_and_is_named(make: Make) -> None:
    whole, _ = Run(make()).add(one := make_request(7, 10)).finish().of(one)
    stop = whole[4]
    ending = make_request(7, 10, stop=[stop])
    run = Run(make()).add(ending).finish()
    assert run.of(ending) == (whole[: whole.index(stop) + 1], "stop")
    assert run.stops[ending.request_id] == stop
    later = make_request(7, 10, stop=[stop], min_tokens=8)
    tokens, _ = Run(make()).add(later).finish().of(later)
    assert len(tokens) >= 8
    assert stop not in tokens[:8]


def test_an_abort_ends_a_running_or_waiting_request_and_no_other(make: Make) -> None:
    requests = [make_request(5, 40) for _ in range(6)]
    run = Run(make()).add(*requests)
    while not run.tokens:
        run.step()
    for request in (requests[0], requests[5]):
        run.engine.abort(request.request_id, "abort")
    run.engine.abort("nobody", "abort")
    run.finish()
    assert [run.of(request)[1] for request in requests] == ["abort", *["length"] * 4, "abort"]
    assert len(run.of(requests[0])[0]) < 40


def test_what_it_cannot_run_is_refused_at_the_door(make: Make) -> None:
    engine = make()
    engine.add(make_request(5, 4, request_id="a/0"))
    for wrong in (
        make_request(5, 4, request_id="a/0"),
        make_request([], 4),
        make_request([VOCABULARY], 4),
        make_request(5, 4, stop=[-1]),
        make_request(5, 4, temperature=-1.0),
    ):
        with pytest.raises(InvalidRequest):
            engine.add(wrong)
    with pytest.raises(ContextLengthExceeded):
        engine.add(make_request(WINDOW - 3, 4))
    assert engine.max_request_tokens() == WINDOW
    run = Run(engine).finish()
    assert run.ends == {"a/0": "length"}
    engine.add(make_request(5, 4, request_id="a/0"))  # its id is free again


def test_interactive_requests_come_before_batch(make: Make) -> None:
    engine = make()
    batch = [make_request(5, 30, klass="batch") for _ in range(4)]
    run = Run(engine).add(*batch)
    while len(run.tokens) < 4:
        run.step()
    assert (engine.free_seats("batch"), engine.free_seats("interactive")) == (0, 4)
    urgent = [make_request(6, 4) for _ in range(4)]
    run.add(*urgent)
    assert (engine.free_seats("batch"), engine.free_seats("interactive")) == (-4, 0)
    while not all(request.request_id in run.ends for request in urgent):
        run.step()
    assert not any(request.request_id in run.ends for request in batch)
    run.finish()
    assert [len(run.of(request)[0]) for request in batch] == [30] * 4
    assert engine.free_seats("batch") == 4


def test_log_probabilities_come_as_many_as_were_asked_for(make: Make) -> None:
    engine = make()
    engine.add(make_request(5, 3, logprobs=3))
    seen = []
    while engine.has_work:
        seen += engine.step()
    for event in seen:
        assert event.logprobs is not None
        assert len(event.logprobs.top) == 3
        assert len({token for token, _ in event.logprobs.top}) == 3
        assert event.logprobs.top == tuple(sorted(event.logprobs.top, key=lambda pair: -pair[1]))
        assert event.logprobs.logprob < 0
        assert dict(event.logprobs.top)[event.token_id] == event.logprobs.logprob
