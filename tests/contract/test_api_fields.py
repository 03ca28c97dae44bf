"""Fields whose effect only shows with a real engine behind the pod: full windows, bans that use all up, reasoning.

A pod and a worker on the tiny model, whose window is 512 tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from tests.support.api_pod import ApiPod, chat_body, chunks_of, running_pod
from tests.support.tiny_model import CHAT_TEMPLATE, make_tiny_llama
from tests.support.workers import running_worker

CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
WINDOW = 512
FORCED = {"logit_bias": {"70": 100}, "temperature": 0}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(make_tiny_llama(Path(tmp_path_factory.mktemp("fields")) / "tiny")), dtype="float32", device="cpu")


@pytest.fixture
async def pod(redis_url: str, loaded: LoadedModel) -> AsyncIterator[ApiPod]:
    async with running_worker(redis_url, loaded), running_pod(redis_url) as pod:
        yield pod


def text_body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **fields}


async def test_lim_07_a_full_window_ends_with_length_and_no_token_more(pod: ApiPod) -> None:
    content = "a" * 490
    empty = (await pod.post(CHAT, chat_body("", max_tokens=1, **FORCED))).json()["usage"]["prompt_tokens"]
    answer = (await pod.post(CHAT, chat_body(content, **FORCED))).json()
    usage = answer["usage"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert empty < usage["prompt_tokens"] < WINDOW
    assert usage["total_tokens"] == WINDOW


async def test_a_prompt_that_is_only_measured_may_fill_the_window(pod: ApiPod) -> None:
    full = [5 + i % 100 for i in range(WINDOW)]
    scored = (await pod.post(TEXT, text_body(full, echo=True, logprobs=0, max_tokens=0))).json()["choices"][0]
    assert len(scored["logprobs"]["token_logprobs"]) == WINDOW
    assert scored["finish_reason"] == "length"
    listed = (await pod.post(TEXT, text_body(full, prompt_logprobs=0, max_tokens=0))).json()["choices"][0]
    assert len(listed["prompt_logprobs"]) == WINDOW
    own = [next(iter(entry.values()))["logprob"] for entry in listed["prompt_logprobs"][1:]]
    assert own == pytest.approx(scored["logprobs"]["token_logprobs"][1:])
    vector = (await pod.post(EMBEDDINGS, {"model": "tiny", "input": full})).json()["data"][0]["embedding"]
    assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-4)
    for path, body in [
        (TEXT, text_body([*full, 5], echo=True, logprobs=0, max_tokens=0)),
        (TEXT, text_body(full, max_tokens=1)),
        (EMBEDDINGS, {"model": "tiny", "input": [*full, 5]}),
    ]:
        error = (await pod.post(path, body)).json()["error"]
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [70, 71], "logit_bias": {"70": -100, "71": -100}}, "logit_bias"),
        ({"allowed_token_ids": [2], "min_tokens": 3}, "min_tokens"),
        ({"logit_bias": {str(token): -100 for token in range(320)}}, "logit_bias"),
    ],
)
async def test_fields_that_leave_no_token_are_a_400_and_never_a_500(
    pod: ApiPod, fields: dict[str, Any], param: str
) -> None:
    for path, body in ((CHAT, chat_body("x", **fields)), (TEXT, text_body("x", **fields))):
        response = await pod.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_an_answer_that_uses_up_what_it_may_say_ends_and_says_why(pod: ApiPod) -> None:
    token = (await pod.post("/tokenize", {"model": "tiny", "prompt": "!"})).json()["tokens"]
    fields = {"allowed_token_ids": token, "bad_words": ["!!!"], "max_tokens": 9}
    whole = (await pod.post(TEXT, text_body("x", logprobs=0, **fields))).json()
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("!!", "stop", "no_token_left")
    assert choice["logprobs"]["tokens"] == ["!", "!"]
    assert whole["usage"]["completion_tokens"] == 2
    chunks = chunks_of(await pod.stream(TEXT, text_body("x", logprobs=0, stream=True, **fields)))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "!!"
    assert [name for chunk in chunks for name in (chunk["choices"][0]["logprobs"] or {}).get("tokens", [])] == [
        "!",
        "!",
    ]
    assert chunks[-1]["choices"][0]["stop_reason"] == "no_token_left"


async def test_the_grammar_wins_over_bans_that_leave_nothing_of_it(pod: ApiPod) -> None:
    banned = {str(token): -100 for token in range(320)}
    response = await pod.post(TEXT, text_body("x", guided_regex="[ab]{3}c", logit_bias=banned, max_tokens=9))
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"][3:] == "c"


async def test_control_tokens_stay_text_unless_a_request_or_the_pod_says_otherwise(
    redis_url: str, loaded: LoadedModel
) -> None:
    async def specials(pod: ApiPod, **fields: Any) -> list[int]:
        body = chat_body("a<|im_end|>b", max_tokens=1, return_token_ids=True, **fields)
        return [token for token in (await pod.post(CHAT, body)).json()["prompt_token_ids"] if token < 3]

    async with running_worker(redis_url, loaded), running_pod(redis_url) as pod:
        assert await specials(pod) == [1, 2, 1]
        assert await specials(pod, parse_control_tokens=True) == [1, 2, 2, 1]
        async with running_pod(redis_url, parse_control_tokens=True) as parsing:
            assert await specials(parsing) == [1, 2, 2, 1]
            assert await specials(parsing, parse_control_tokens=False) == [1, 2, 1]


async def test_reasoning_tokens_in_every_usage(redis_url: str, loaded: LoadedModel) -> None:
    """The template opens the reasoning and the model never closes it: all it says is reasoning."""
    thinking = dataclasses.replace(loaded, chat_template=CHAT_TEMPLATE + "{{ '<think>\n' }}")
    fields = {"max_tokens": 7, "ignore_eos": True, **FORCED}
    async with running_worker(redis_url, thinking), running_pod(redis_url) as pod:
        whole = (await pod.post(CHAT, chat_body("x", **fields))).json()
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}
        assert len(whole["choices"][0]["message"]["reasoning"]) >= 7
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = chunks_of(await pod.stream(CHAT, chat_body("x", stream=True, stream_options=options, **fields)))
        told = [chunk["usage"] for chunk in chunks]
        counts = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in told]
        assert counts == sorted(counts)
        assert counts == [usage["completion_tokens"] for usage in told]
        assert told[-1] == whole["usage"] | {"prompt_tokens_details": told[-1]["prompt_tokens_details"]}


async def test_the_only_model_need_not_be_named_to_the_tokenizer(pod: ApiPod) -> None:
    named = (await pod.post("/tokenize", {"model": "tiny", "prompt": "Hi there"})).json()
    assert (await pod.post("/tokenize", {"prompt": "Hi there"})).json() == named
    for unnamed in (None, ""):
        assert (await pod.post("/tokenize", {"model": unnamed, "prompt": "Hi there"})).json() == named
    chat = {"messages": [{"role": "user", "content": "Hi there"}]}
    assert (await pod.post("/tokenize", chat | {"model": None})).json()["count"] > named["count"]
    assert (await pod.post("/tokenize", {"model": 1, "prompt": "Hi"})).json()["error"]["param"] == "model"
    assert (await pod.post("/detokenize", {"tokens": named["tokens"]})).json()["prompt"].endswith("Hi there")
    info = (await pod.client.get("/tokenizer_info")).json()
    assert (info["chat_template"], info["model_max_length"]) == (CHAT_TEMPLATE, WINDOW)
    assert (await pod.client.get("/tokenizer_info?model=other")).status_code == 404
