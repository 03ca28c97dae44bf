"""One request's fault stays its own: rows that raise, rows that cannot go on, bad input, a broken engine."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from engine_worker.models.base import LoadedModel
from engine_worker.request import Request, TokenEvent
from kernels.ops import ModelOutput
from shared.errors import InvalidRequest
from shared.params import SamplingParams
from tests.support.engines import EngineRun, engine_for
from tests.support.requests import make_request

POISON = 311


class FragileModel:
    """The tiny model, except that it does not survive token `POISON` (raises, or yields NaN from there on)."""

    def __init__(self, model: Any, fault: str) -> None:
        self._model = model
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(
        self, token_ids: torch.Tensor, layout: Any, kv_cache: Any, sample_at: torch.Tensor | None, wanted: list[int]
    ) -> ModelOutput:
        poisoned = token_ids == POISON
        if self._fault == "raise" and bool(poisoned.any()):
            raise RuntimeError("kernel fault")
        if self._fault == "always":
            raise RuntimeError("device lost")
        output: ModelOutput = self._model.forward(token_ids, layout, kv_cache, sample_at)
        odd = poisoned if sample_at is None else poisoned[sample_at]
        logits = torch.where(odd[:, None], torch.nan, output.logits)
        best = logits.argmax(-1)
        hidden = torch.where(poisoned[:, None], torch.nan, output.hidden)
        return ModelOutput(hidden, logits[wanted], best, logits[torch.arange(len(best)), best])


def fragile(tiny: LoadedModel, fault: str, **config: Any) -> EngineRun:
    return EngineRun(engine_for(dataclasses.replace(tiny, model=FragileModel(tiny.model, fault)), **config))


def outputs(run: EngineRun, requests: list[Request]) -> list[list[int]]:
    return [run.tokens(request) for request in requests]


def good_requests(count: int = 4) -> list[Request]:
    return [make_request([10 + number] * 9, 8) for number in range(count)]


def undisturbed(tiny: LoadedModel, count: int = 4) -> list[list[int]]:
    run, requests = EngineRun(engine_for(tiny)), good_requests(count)
    run.add(*requests)
    run.finish()
    return outputs(run, requests)


@pytest.mark.parametrize("fault", ["raise", "nan"])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_sc_14_a_row_that_breaks_the_step_fails_alone(tiny: LoadedModel, fault: str, place: int) -> None:
    run, requests = fragile(tiny, fault), good_requests()
    poisoned = make_request([1, 2, POISON], 5)
    everyone = [*requests[:place], poisoned, *requests[place:]]
    run.add(*everyone)
    run.finish()
    end = run.end(poisoned)
    assert (end.finish_reason, end.error_code) == ("error", "engine_failure")
    assert end.error_message
    assert "kernel fault" not in end.error_message
    assert outputs(run, requests) == undisturbed(tiny)


def test_sc_14_a_row_that_fails_in_the_middle_of_its_output_fails_alone(tiny: LoadedModel) -> None:
    run, requests = fragile(tiny, "raise"), good_requests()
    late = make_request(6, 8, logit_bias={POISON: 100.0})
    run.add(*requests, late)
    run.finish()
    assert run.tokens(late) == [POISON]
    assert run.end(late).finish_reason == "error"
    assert outputs(run, requests) == undisturbed(tiny)


def test_sc_14_two_bad_rows_in_one_batch_both_fail_and_nobody_else(tiny: LoadedModel) -> None:
    run, requests = fragile(tiny, "raise"), good_requests(6)
    bad = [make_request([POISON], 5), make_request([3, POISON, 4], 5)]
    run.add(bad[0], *requests, bad[1])
    run.finish()
    assert [run.end(request).finish_reason for request in bad] == ["error", "error"]
    assert outputs(run, requests) == undisturbed(tiny, 6)


def test_content_of_a_failed_request_is_not_found_by_others(tiny: LoadedModel) -> None:
    run = fragile(tiny, "nan", block_size=4)
    prompt = [*range(1, 13), POISON]
    run.add(make_request(prompt, 3))
    run.finish()
    follower = make_request(list(range(1, 13)), 3)
    run.add(follower)
    run.finish()
    assert run.end(follower).num_cached_tokens == 0


def test_an_engine_that_fails_for_everyone_says_so_instead_of_failing_requests(tiny: LoadedModel) -> None:
    run = fragile(tiny, "always")
    run.add(*good_requests())
    with pytest.raises(RuntimeError, match="device lost"):
        run.step()


def test_an_engine_that_fails_one_request_after_the_other_gives_up(tiny: LoadedModel) -> None:
    run, requests = fragile(tiny, "always"), good_requests(3)
    for request in requests[:2]:
        run.add(request)
        run.step()
        assert run.end(request).finish_reason == "error"
    run.add(requests[2])
    with pytest.raises(RuntimeError, match="device lost"):
        run.step()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": dict.fromkeys(range(320), -100.0)}, "logit_bias"),
        ({"logit_bias": {9: -math.inf, 8: -100.0}, "allowed_token_ids": (8, 9)}, "logit_bias"),
        ({"bad_words": ((9,), (8,)), "allowed_token_ids": (8, 9)}, "bad_words"),
        ({"stop": [9], "min_tokens": 2, "allowed_token_ids": (9,)}, "min_tokens"),
        ({"stop": range(320), "min_tokens": 1}, "min_tokens"),
        ({"logit_bias": {8: -100.0}, "bad_words": ((9,),), "allowed_token_ids": (8, 9)}, "bad_words"),
    ],
)
def test_sm_06_fields_that_leave_no_token_to_begin_with_are_refused(
    tiny: LoadedModel, fields: dict[str, Any], named: str
) -> None:
    run, requests = EngineRun(engine_for(tiny)), good_requests(3)
    with pytest.raises(InvalidRequest) as refused:
        run.add(make_request(5, 5, **fields))
    assert refused.value.param == named
    run.add(*requests)
    assert outputs(run.finish(), requests) == undisturbed(tiny, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"bad_words": ((9, 9),), "allowed_token_ids": (9,)}, [9]),
        ({"bad_words": ((9, 9), (9, 8), (8, 9)), "logit_bias": {8: -100.0}, "allowed_token_ids": (8, 9)}, [9]),
        (
            {"bad_words": ((9, 9),), "allowed_token_ids": (9, 2), "stop": [2], "min_tokens": 4, "logit_bias": {9: 50}},
            [9],
        ),
    ],
)
def test_sm_06_an_answer_that_uses_up_what_its_fields_allow_ends_there(
    tiny: LoadedModel, temperature: float, fields: dict[str, Any], tokens: list[int]
) -> None:
    run, requests = EngineRun(engine_for(tiny)), good_requests(3)
    spent = make_request(5, 6, temperature=temperature, **fields)
    run.add(requests[0], spent, *requests[1:])
    run.finish()
    assert run.tokens(spent) == tokens
    assert (run.end(spent).finish_reason, run.end(spent).exhausted) == ("stop", True)
    assert outputs(run, requests) == undisturbed(tiny, 3)
    again = make_request(5, 6, temperature=temperature, output=tokens, **fields)
    assert run_one(tiny, again).exhausted, "a take-over ends there too"


def run_one(tiny: LoadedModel, request: Request) -> TokenEvent:
    run = EngineRun(engine_for(tiny))
    run.add(request)
    return run.finish().end(request)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"output": [320]}, "output"),
        ({"stop": [320]}, "stop_token_ids"),
        ({"stop": [-1]}, "stop_token_ids"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1.0}, "min_p"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": 321}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {320: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: math.inf}}, "logit_bias"),
    ],
)
def test_sc_14_the_door_refuses_by_name(tiny: LoadedModel, change: dict[str, Any], named: str) -> None:
    engine = engine_for(tiny)
    with pytest.raises(InvalidRequest) as caught:
        engine.add(make_request(**change))
    assert caught.value.param == named
    assert not engine.has_work


def odd_request(rng: random.Random) -> Request:
    """Anything that a decoder could let through, often out of range."""
    number = rng.choice([0.0, 1.0, -1.0, 1e-9, 1e9, 0.5, math.nan, math.inf, -math.inf, 2.0**70])
    field = rng.choice([f.name for f in dataclasses.fields(SamplingParams)])
    whole = int(number) if math.isfinite(number) else 7
    value: Any = {
        "top_k": whole,
        "min_tokens": whole,
        "logprobs": whole,
        "seed": whole,
        "logit_bias": {rng.choice([-1, 0, 5, 319, 320, 2**40]): number},
        "allowed_token_ids": rng.choice([None, (), (whole,), (5, 320), (-1,)]),
        "bad_words": rng.choice([(), ((),), ((whole,),), ((5, 6),)]),
        "prompt_logprobs": whole,
        "grammar": None,
    }.get(field, number)
    request = make_request(
        [rng.choice([0, 1, 319, 320, -5])] * rng.choice([0, 1, 1, 9, 600]),
        rng.choice([-1, 0, 1, 1, 3]),
        stop=rng.choice([[], [2], [-3], [2**33]]),
        seed=rng.choice([0, -1, 2**63, 2**64]),
    )
    request.sampling = dataclasses.replace(SamplingParams(), **{field: value})
    return request


def test_sc_14_odd_requests_never_disturb_four_good_streams(tiny: LoadedModel) -> None:
    rng = random.Random(4)
    run, requests = EngineRun(engine_for(tiny, max_num_batched_tokens=64)), good_requests()
    refused = 0
    run.add(*requests)
    for _ in range(1000):
        try:
            run.add(odd_request(rng))
        except InvalidRequest:
            refused += 1
        if rng.random() < 0.05:
            run.step()
    run.finish()
    assert outputs(run, requests) == undisturbed(tiny)
    assert refused < 1000
