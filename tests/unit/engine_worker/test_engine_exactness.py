"""One answer, whatever becomes of it: each kind of request in each situation says what it says alone in a fresh engine.

Kinds differ in the fields that shape an answer, situations in what a scheduler may do to a request. The runs alone have
neither neighbours nor a cache; `test_engine_oracle.py` holds greedy ones against transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from engine_worker.engine import Engine
from engine_worker.models.base import LoadedModel
from engine_worker.request import Request
from tests.support.engines import EngineRun, engine_for
from tests.support.requests import make_request

KINDS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
    "greedy penalties": {"presence_penalty": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
    "bounds": {"temperature": 1.0, "min_tokens": 8, "stop": range(0, 320, 2)},
    "words": {"temperature": 1.0, "logit_bias": {5: 4.0, 9: -100.0}, "bad_words": ((7,), (5, 5)), "logprobs": 0},
    "chosen": {"temperature": 1.0, "allowed_token_ids": tuple(range(40, 90))},
    "scored": {"temperature": 1.0, "seed": 77, "prompt_logprobs": 1},
}
PROMPTS = (list(range(3, 13)), [*range(3, 40), *range(100, 130)])
"""Ten tokens, and 67 of which nine blocks of four are not those of the other."""
OUTPUT = 16


@dataclass(frozen=True)
class Said:
    tokens: list[int]
    end: tuple[str | None, int | None]
    logprobs: list[float]
    """Of each token and its best competitors."""
    scores: list[float]
    """Of the prompt's tokens."""


def asked(output: Mapping[str, list[int]] | None = None, **changes: Any) -> list[Request]:
    """Every kind with every prompt; `output`: what each of them has said already."""
    known = output or {}
    return [
        make_request(
            prompt,
            OUTPUT,
            **({"request_id": f"{kind} {len(prompt)}", "seed": 6, "logprobs": 3} | fields | changes),
            output=known.get(f"{kind} {len(prompt)}", []),
        )
        for kind, fields in KINDS.items()
        for prompt in PROMPTS
    ]


def said(run: EngineRun, requests: Iterable[Request]) -> dict[str, Said]:
    told = {}
    for request in requests:
        events = run.events[request.request_id]
        given = [event.logprobs for event in events if event.logprobs is not None]
        told[request.request_id] = Said(
            run.tokens(request),
            (run.end(request).finish_reason, run.end(request).stop_token_id),
            [value for one in given for value in (one.logprob, *(top for _, top in one.top))],
            [score.logprob for event in events for score in event.prompt_logprobs],
        )
    return told


def check(found: dict[str, Said], wanted: dict[str, Said]) -> None:
    for name, answer in found.items():
        assert answer.tokens == wanted[name].tokens, name
        assert answer.end == wanted[name].end, name
        assert answer.logprobs == pytest.approx(wanted[name].logprobs, abs=1e-4), name
        assert answer.scores == pytest.approx(wanted[name].scores, abs=1e-4), name


@pytest.fixture(scope="module")
def alone(tiny: LoadedModel) -> dict[str, Said]:
    answers = {}
    for request in asked():
        run = EngineRun(engine_for(tiny, enable_prefix_caching=False))
        run.add(request)
        answers |= said(run.finish(), [request])
    return answers


def test_every_kind_has_an_answer_of_its_own(alone: dict[str, Said]) -> None:
    """Else nothing below would show that its fields count."""
    for prompt in PROMPTS:
        answers = [tuple(alone[f"{kind} {len(prompt)}"].tokens) for kind in KINDS]
        assert len(set(answers)) == len(answers)
    ends = [alone[f"bounds {len(prompt)}"] for prompt in PROMPTS]
    assert {answer.end[0] for answer in ends} == {"stop"}
    assert all(len(answer.tokens) > 8 for answer in ends)
    assert all(len(alone[f"scored {len(prompt)}"].scores) == len(prompt) - 1 for prompt in PROMPTS)


def neighbours(count: int, **changes: Any) -> list[Request]:
    return [make_request([200 + n] * (3 * n + 1), n + 5, seed=n, temperature=n % 2, **changes) for n in range(count)]


@pytest.mark.parametrize("budget", [18, 300])
@pytest.mark.parametrize("caching", [True, False])
def test_in_company(tiny: LoadedModel, alone: dict[str, Said], budget: int, caching: bool) -> None:
    engine = engine_for(tiny, max_num_batched_tokens=budget, max_num_seqs=18, enable_prefix_caching=caching)
    requests, others = asked(), neighbours(9)
    mixed = [one for three in zip(requests[::2], others, requests[1::2], strict=True) for one in three]
    check(said(EngineRun(engine).staggered(mixed, every=1), requests), alone)


def test_from_the_cache(tiny: LoadedModel, alone: dict[str, Said]) -> None:
    """The second time all full blocks are there, except for those that are scored."""
    run = EngineRun(engine_for(tiny, block_size=4))
    for times in range(2):
        requests = asked()
        for request in requests:
            run.events.pop(request.request_id, None)
        run.add(*requests)
        check(said(run.finish(), requests), alone)
        if times:
            found = {r.num_cached_tokens for r in requests if r.sampling.prompt_logprobs is None}
            assert found == {8, 64}


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_after_every_token(tiny: LoadedModel, alone: dict[str, Said], caching: bool) -> None:
    engine = engine_for(tiny, block_size=4, max_num_batched_tokens=100, enable_prefix_caching=caching)
    requests, run = asked(), EngineRun(engine)
    run.add(*requests)
    lost = {request.request_id: -1 for request in requests}
    while engine.has_work:
        for request in requests:
            if request.block_table and len(request.output_token_ids) > lost[request.request_id]:
                lost[request.request_id] = len(request.output_token_ids)
                engine._scheduler._preempt(request)
        run.step()
    check(said(run, requests), alone)
    assert all(r.num_preemptions >= len(alone[r.request_id].tokens) - 1 for r in requests)
    counters = engine.stats().counters
    assert counters["generation_tokens"] == sum(len(answer.tokens) for answer in alone.values())
    assert counters["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in requests)
    assert all(r.prompt_token_ids in PROMPTS for r in requests)


@pytest.mark.parametrize("klass", ["interactive", "batch"])
@pytest.mark.parametrize("caching", [True, False])
def test_short_of_blocks_and_seats(
    tiny: LoadedModel, alone: dict[str, Said], klass: Any, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those asked lose their blocks to each other; as batch work also to interactive requests that come meanwhile."""
    monkeypatch.setattr("engine_worker.scheduling.scheduler.HEADROOM_TOKENS", 0)
    engine = engine_for(tiny, block_size=4, num_blocks=45, max_num_seqs=8, enable_prefix_caching=caching)
    requests, run = asked(klass=klass), EngineRun(engine)
    run.add(*requests)
    for other in neighbours(9):
        run.step()
        run.step()
        run.add(other)
    check(said(run.finish(), requests), alone)
    assert sum(request.num_preemptions > 0 for request in requests) >= 2


def handed_over(run: EngineRun, wanted: dict[str, Said], tokens: int) -> tuple[list[Request], dict[str, Said]]:
    """Requests of which another worker has logged so many tokens, and what is left to say of each."""
    logged = {name: answer.tokens[:tokens] for name, answer in wanted.items()}
    requests = asked(logged)
    for request in requests:
        per_token = 1 + (request.sampling.logprobs or 0)
        answer = wanted[request.request_id]
        request.num_scored = len(answer.scores)
        wanted[request.request_id] = Said(answer.tokens[tokens:], answer.end, answer.logprobs[per_token * tokens :], [])
    run.add(*requests)
    return requests, wanted


@pytest.mark.parametrize("tokens", [1, 7, 9])
@pytest.mark.parametrize(
    "before",
    [lambda run: None, lambda run: run.add(*neighbours(6)), lambda run: (run.add(*asked()), run.finish())],
    ids=["alone", "in company", "cached"],
)
def test_after_a_take_over(
    tiny: LoadedModel, alone: dict[str, Said], tokens: int, before: Callable[[EngineRun], object]
) -> None:
    run = EngineRun(fresh(tiny))
    before(run)
    for name in alone:
        run.events.pop(name, None)
    requests, wanted = handed_over(run, dict(alone), tokens)
    check(said(run.finish(), requests), wanted)


def fresh(tiny: LoadedModel) -> Engine:
    return engine_for(tiny, block_size=4, max_num_batched_tokens=64)
