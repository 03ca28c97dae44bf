"""Log-probabilities of prompt tokens and embeddings against transformers: whatever the chunks, batch and cache."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from engine_worker.models.base import LoadedModel
from engine_worker.request import PromptLogprobs, Request
from engine_worker.runner import measure
from shared.errors import InvalidRequest
from shared.params import SamplingParams
from tests.support.engines import EngineRun, engine_for
from tests.support.requests import make_request

TOP = 3


def make_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


def scoring(prompt: list[int], output: int = 2, **changes: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=TOP)
    return dataclasses.replace(make_request(prompt, max(output, 1)), sampling=sampling, max_tokens=output, **changes)


def scores_of(run: EngineRun, request: Request) -> list[PromptLogprobs]:
    events = run.events[request.request_id]
    told = [bool(event.prompt_logprobs) for event in events]
    drawn = [event.token_id is not None for event in events]
    assert told == sorted(told, reverse=True) or not any(drawn[: told.index(False)]), "scores come before tokens"
    return [score for event in events for score in event.prompt_logprobs]


def check(scores: list[PromptLogprobs], reference: Any, prompt: list[int]) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [score.token_id for score in scores] == prompt[1:]
    for position, score in enumerate(scores):
        row = expected[position]
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-3)
        assert [value for _, value in score.top] == pytest.approx(row.topk(TOP).values.tolist(), abs=1e-3)
        assert all(value == score.logprob for token, value in score.top if token == score.token_id)
        assert (score.rank <= TOP) == (score.token_id in dict(score.top))
        assert score.rank == int((row > row[score.token_id]).sum()) + 1


@pytest.mark.parametrize("budget", [16, 64, 2048])
@pytest.mark.parametrize("output", [0, 1, 3])
def test_lgp_08_scores_of_every_prompt_token_but_the_first(
    tiny: LoadedModel, reference: Any, budget: int, output: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_LOGITS_AT_ONCE", 5 * tiny.config.vocab_size)
    prompts = [make_prompt(length, seed) for seed, length in enumerate((100, 2, 1, 37))]
    run = EngineRun(engine_for(tiny, max_num_batched_tokens=budget))
    plain = make_request(make_prompt(40, 9), 8)
    requests = [scoring(prompt, output) for prompt in prompts]
    run.add(plain, *requests)
    run.finish()
    for request, prompt in zip(requests, prompts, strict=True):
        check(scores_of(run, request), reference, prompt)
        assert len(run.tokens(request)) == output
        assert run.end(request).finish_reason == "length"
    alone = EngineRun(engine_for(tiny))
    alone.add(again := make_request(make_prompt(40, 9), 8))
    assert alone.finish().tokens(again) == run.tokens(plain)


def test_cached_prefixes_do_not_hide_scores(tiny: LoadedModel, reference: Any) -> None:
    prompt = make_prompt(100)
    run = EngineRun(engine_for(tiny))
    for request in (make_request(prompt, 2), scoring(prompt), scoring(prompt)):
        run.add(request)
        run.finish()
        if request.sampling.prompt_logprobs is not None:
            check(scores_of(run, request), reference, prompt)
            assert run.end(request).num_cached_tokens == 0
    run.add(plain := make_request(prompt, 2))
    assert run.finish().end(plain).num_cached_tokens == 96


def test_a_preempted_request_tells_no_score_twice(
    tiny: LoadedModel, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is preempted in the middle of its prompt: those that decode beside it take its blocks."""
    monkeypatch.setattr("engine_worker.scheduling.scheduler.HEADROOM_TOKENS", 0)
    prompts = [*(make_prompt(20, seed) for seed in range(4)), make_prompt(150, 4)]
    run = EngineRun(engine_for(tiny, block_size=4, num_blocks=68, max_num_batched_tokens=12))
    requests = [scoring(prompt, 60) for prompt in prompts]
    run.add(*requests)
    while not requests[-1].num_preemptions and run.engine.has_work:
        run.step()
    assert 0 < requests[-1].num_scored < 149
    run.finish()
    for request, prompt in zip(requests, prompts, strict=True):
        check(scores_of(run, request), reference, prompt)


def test_a_take_over_goes_on_after_the_scores_that_were_logged(tiny: LoadedModel, reference: Any) -> None:
    prompt = make_prompt(80)
    run = EngineRun(engine_for(tiny))
    run.add(make_request(prompt, 1))  # fills the cache
    run.finish()
    run.add(request := scoring(prompt, 0, num_scored=50))
    run.finish()
    scores = scores_of(run, request)
    assert len(scores) == 29
    whole = EngineRun(engine_for(tiny))
    whole.add(first := scoring(prompt, 0))
    logged = scores_of(whole.finish(), first)[:50]
    check([*logged, *scores], reference, prompt)
    run.add(nothing_left := scoring(prompt, 0, num_scored=79))
    assert run.finish().end(nothing_left).finish_reason == "length"
    assert run.engine.stats().counters["cached_tokens"] >= 48


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("budget", [16, 2048])
def test_emb_01_pooled_hidden_states_of_unit_length(
    tiny: LoadedModel, reference: Any, pooling: Any, budget: int
) -> None:
    prompts = [make_prompt(length, length) for length in (1, 33, 90)]
    run = EngineRun(engine_for(tiny, max_num_batched_tokens=budget))
    for _ in range(2):  # the second time from the cache
        requests = [dataclasses.replace(make_request(p, 1), max_tokens=0, pooling=pooling) for p in prompts]
        run.add(*requests)
        run.finish()
        for request, prompt in zip(requests, prompts, strict=True):
            with torch.inference_mode():
                hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
            wanted = torch.nn.functional.normalize(hidden[-1] if pooling == "last" else hidden.mean(0), dim=0)
            assert run.end(request).embedding == pytest.approx(wanted.tolist(), abs=1e-4)
            assert run.tokens(request) == []


def test_only_what_measures_may_ask_for_no_token(tiny: LoadedModel) -> None:
    engine = engine_for(tiny)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        engine.add(dataclasses.replace(make_request(5, 1), max_tokens=0))
