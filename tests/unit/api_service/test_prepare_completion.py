"""Text completions: prompts of every form, limits, sampling parameters in one spelling."""

from __future__ import annotations

from typing import Any

import pytest

from api_service.prepare.completion import prepare_completion
from api_service.prepare.model import ServedModel
from api_service.schemas.common import parse
from api_service.schemas.completion import CompletionRequest
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import GenerateRequest
from shared.params import SamplingParams
from tests.support.scripted_worker import token_ids
from tests.support.served import served


def prepare(prompt: Any, model: ServedModel | None = None, **fields: Any) -> GenerateRequest:
    return prepare_completion(
        parse(CompletionRequest, {"model": "tiny", "prompt": prompt, **fields}), model or served()
    )


def sampling(**fields: Any) -> SamplingParams:
    return prepare("x", **fields).sampling


def refused(prompt: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        prepare(prompt, **fields)
    return error.value


def test_forms_of_prompts_and_one_request_for_all() -> None:
    hello, world = token_ids("Hello"), token_ids("world")
    assert prepare("Hello").prompts == (tuple(hello),)
    assert prepare(["Hello", "world"], n=2).prompts == (tuple(hello), tuple(world))
    assert prepare(["Hello", "world"], n=2).num_choices == 4
    assert prepare(hello).prompts == (tuple(hello),)
    assert prepare([hello, world]).prompts == (tuple(hello), tuple(world))


def test_control_tokens_in_a_plain_prompt_are_control_tokens() -> None:
    assert prepare("<|im_start|>user").prompts[0][0] == 1
    assert prepare([0, 1, 2]).prompts == ((0, 1, 2),)


def test_prm_05_bos_of_models_that_want_one() -> None:
    model = served(add_bos=True)
    assert prepare("A", model).prompts[0] == (1, *token_ids("A"))
    assert prepare("A", model, add_special_tokens=False).prompts[0] == tuple(token_ids("A"))
    assert prepare("", model).prompts == ((1,),)
    assert prepare([5], model).prompts == ((5,),)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ([""], "prompt"), ([[]], "prompt"), ([[49], []], "prompt[1]"), (["A", ""], "prompt[1]")],
)
def test_prm_01_02_empty_prompts_name_their_element(prompt: Any, param: str) -> None:
    assert refused(prompt).param == param


@pytest.mark.parametrize("bad", [[-1], [421], [2**31], [2**63]])
def test_prm_03_ids_outside_the_vocabulary(bad: list[int]) -> None:
    assert refused(bad).param == "prompt"
    assert refused([[1], bad]).param == "prompt[1]"


@pytest.mark.parametrize("bad", [-1, 421, 60001])
def test_stp_07_stop_token_ids_outside_the_vocabulary(bad: int) -> None:
    assert refused("x", stop_token_ids=[bad]).param == "stop_token_ids"


@pytest.mark.parametrize("bad", ["421", "60000"])
def test_smp_03_logit_bias_outside_the_vocabulary(bad: str) -> None:
    assert refused("x", logit_bias={bad: -100}).param == "logit_bias"
    assert sampling(logit_bias={"420": 100, "1": 0}).logit_bias == {420: 100.0}


def test_lim_04_default_is_16_tokens_or_the_room_left() -> None:
    assert prepare("x").stop.max_tokens == 16
    assert prepare([5] * 250).stop.max_tokens == 6


def test_lim_05_and_07_the_window() -> None:
    assert prepare([5] * 255, max_tokens=1).stop.max_tokens == 1
    assert refused([5] * 255, max_tokens=2).param == "max_tokens"
    for length in (256, 257, 100_000):
        error = refused([5] * length)
        assert isinstance(error, ContextLengthExceeded)
        assert "256 tokens" in error.message
        assert str(length) in error.message


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert refused("x", min_tokens=17).param == "min_tokens"
    assert sampling(min_tokens=16).min_tokens == 16


def test_smp_06_one_spelling_of_off_and_greedy() -> None:
    assert sampling(top_k=-1).top_k == sampling(top_k=0).top_k == sampling(top_k=10**9).top_k == 0
    for greedy in ({"temperature": 0}, {"temperature": 1e-9}, {"top_p": 0, "temperature": 1}, {"top_k": 1}):
        assert sampling(**greedy).temperature == 0
    assert sampling().temperature == 1
    assert (sampling(top_p=0.5).top_p, sampling(top_k=7).top_k, sampling(min_p=0.1).min_p) == (0.5, 7, 0.1)


def test_model_defaults_hold_where_the_client_is_silent() -> None:
    model = served(defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20.0, "repetition_penalty": 1.1})
    chosen = prepare("x", model).sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    given = prepare("x", model, temperature=1, top_p=1, top_k=0, repetition_penalty=1).sampling
    assert (given.temperature, given.top_p, given.top_k, given.repetition_penalty) == (1, 1, 0, 1)


def test_smp_04_05_seeds() -> None:
    assert sampling(seed=-5).seed == -5
    assert sampling(seed=0).seed == 0
    assert len({sampling().seed for _ in range(20)}) == 20


def test_what_scores_prompts_asks_for_as_many_alternatives_as_the_larger_wish() -> None:
    assert sampling(echo=True, logprobs=2).prompt_logprobs == 2
    assert sampling(echo=True, logprobs=2, prompt_logprobs=5).prompt_logprobs == 5
    assert sampling(logprobs=2).prompt_logprobs is None
    assert prepare("x", echo=True, logprobs=0, max_tokens=0).stop.max_tokens == 0
    assert prepare("x", prompt_logprobs=3).prompt_logprobs == 3


def test_extensions_pass_through() -> None:
    request = prepare("x", priority=-3, cache_salt="s", return_token_ids=True)
    assert (request.priority, request.cache_salt, request.return_token_ids) == (-3, "s", True)
    words = sampling(bad_words=["world"]).bad_words
    assert set(words) == {tuple(token_ids("world")), tuple(token_ids(" world"))}
    assert refused("x", allowed_token_ids=[100_000]).param == "allowed_token_ids"


def test_the_end_of_a_prompt_is_kept() -> None:
    ids = token_ids("Hello world again")
    cut = prepare("Hello world again", truncate_prompt_tokens=2, echo=True)
    assert cut.prompts == (tuple(ids[-2:]),)
    assert "Hello world again".endswith(cut.echo[0])
    long = prepare([5] * 300, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(long.prompts[0]) == 246  # the window is 256
    assert refused([5] * 300, truncate_prompt_tokens=256).code == "context_length_exceeded"


def test_a_suffix_needs_fill_in_the_middle_tokens() -> None:
    assert refused("def f(", suffix="return x").param == "suffix"
    assert prepare("x", suffix="").prompts == prepare("x").prompts


def test_echo_gives_the_texts_back() -> None:
    assert prepare(["Hello", "world"], echo=True).echo == ("Hello", "world")
    assert prepare(token_ids("世界!"), echo=True).echo == ("世界!",)
    assert prepare("\ufffd", echo=True).echo == ("\ufffd",)
    assert prepare("Hello").echo == ()


def test_stop_conditions_are_carried() -> None:
    fields = {"stop": "a", "stop_token_ids": [5], "ignore_eos": True, "include_stop_str_in_output": True}
    stop = prepare("x", **fields, skip_special_tokens=False).stop
    assert (stop.stop, stop.stop_token_ids, stop.ignore_eos) == (("a",), (5,), True)
    assert (stop.include_stop_str_in_output, stop.skip_special_tokens) == (True, False)
