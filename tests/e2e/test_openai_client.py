"""OpenAI's own client against the real stack, only the base URL changed."""

from __future__ import annotations

import time

import httpx
import openai
import pytest

from tests.e2e.conftest import REAL_MODEL
from tests.support.stack import Stack

pytestmark = pytest.mark.real_model

HAIKU = [{"role": "user", "content": "Write a short haiku about Python programming."}]


@pytest.fixture
def client(real_stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=real_stack.pods[0].base_url, api_key="none", max_retries=0)


def test_words_arrive_while_the_haiku_is_written(client: openai.OpenAI) -> None:
    started = time.monotonic()
    arrivals = []
    with client.chat.completions.create(model=REAL_MODEL, messages=HAIKU, stream=True, seed=7) as stream:
        arrivals.extend(
            time.monotonic() - started for chunk in stream if chunk.choices and chunk.choices[0].delta.content
        )
    total = time.monotonic() - started
    assert len(arrivals) > 5
    assert arrivals[0] < total / 3


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 7}, {"seed": -3, "temperature": 1.3, "top_p": 0.9}])
def test_streamed_text_equals_the_whole_answer(client: openai.OpenAI, sampling: dict[str, float]) -> None:
    whole = client.chat.completions.create(model=REAL_MODEL, messages=HAIKU, max_tokens=48, **sampling)
    chunks = list(
        client.chat.completions.create(
            model=REAL_MODEL,
            messages=HAIKU,
            max_tokens=48,
            stream=True,
            stream_options={"include_usage": True},
            **sampling,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert text == whole.choices[0].message.content != ""
    assert reasons == [whole.choices[0].finish_reason]
    assert next(chunk.choices[0].delta.role for chunk in chunks if chunk.choices) == "assistant"
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    used, told = chunks[-1].usage, whole.usage
    assert used is not None
    assert told is not None
    assert (used.prompt_tokens, used.completion_tokens) == (told.prompt_tokens, told.completion_tokens)


def test_the_other_pod_gives_the_same_answer(client: openai.OpenAI, real_stack: Stack) -> None:
    other = client.with_options(base_url=real_stack.pods[1].base_url)
    first, second = (
        c.completions.create(model=REAL_MODEL, prompt="The capital of France is", max_tokens=8, temperature=0)
        for c in (client, other)
    )
    assert first.choices[0].text == second.choices[0].text
    assert "Paris" in first.choices[0].text


def test_models_are_listed_alike_on_both_pods(real_stack: Stack) -> None:
    lists = [httpx.get(f"{pod.base_url}/models").json() for pod in real_stack.pods]
    assert lists[0] == lists[1]
    [model] = lists[0]["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (REAL_MODEL, "model", 8192)


def test_several_choices_and_prompts_map_to_their_indices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=REAL_MODEL, prompt=["A", "B"], n=2, max_tokens=2, temperature=0, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[0] for choice in answer.choices] == ["A", "A", "B", "B"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)


def test_a_stop_string_across_tokens_is_never_seen(client: openai.OpenAI) -> None:
    """Token 905 is ` world`: forced, it repeats; the stop begins in one token and ends in the next."""
    request = {
        "model": REAL_MODEL,
        "prompt": "x",
        "max_tokens": 8,
        "temperature": 0,
        "logit_bias": {"905": 100},
        "stop": ["rld wo"],
    }
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    assert whole.choices[0].text == " wo" == "".join(chunk.choices[0].text for chunk in chunks)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2


def test_an_unknown_model_is_the_clients_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=HAIKU)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
