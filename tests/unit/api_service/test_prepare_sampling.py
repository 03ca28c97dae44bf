"""Sampling fields that contradict each other, or that only the window decides: refused by name, before the queue."""

from __future__ import annotations

from typing import Any

import pytest

from api_service.prepare.chat import prepare_chat
from api_service.prepare.completion import prepare_completion
from api_service.prepare.embedding import prepare_embedding
from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import parse
from api_service.schemas.completion import CompletionRequest
from api_service.schemas.embedding import EmbeddingRequest
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import GenerateRequest
from tests.support.scripted_worker import token_ids
from tests.support.served import served

BAN = -100
WINDOW = 256
SCORES: list[dict[str, Any]] = [{"echo": True, "logprobs": 1, "max_tokens": 0}, {"prompt_logprobs": 0, "max_tokens": 0}]


def completion(prompt: Any = "x", **fields: Any) -> GenerateRequest:
    return prepare_completion(parse(CompletionRequest, {"model": "tiny", "prompt": prompt, **fields}), served())


def chat(**fields: Any) -> GenerateRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **fields}
    return prepare_chat(parse(ChatCompletionRequest, body), served())


def one_token(text: str) -> int:
    [token] = token_ids(text)
    return token


@pytest.mark.parametrize("prepare", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [40, 41], "logit_bias": {"40": BAN, "41": BAN}}, "logit_bias"),
        ({"logit_bias": {str(token): BAN for token in range(421)}}, "logit_bias"),
        ({"allowed_token_ids": [40], "logit_bias": {"40": BAN}, "min_tokens": 3}, "logit_bias"),
        ({"allowed_token_ids": [one_token("a")], "bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [2, 9], "stop_token_ids": [9], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [9], "stop_token_ids": [9], "ignore_eos": True, "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [2, 40], "logit_bias": {"40": BAN}, "min_tokens": 1}, "min_tokens"),
    ],
)
def test_fields_that_leave_no_token_name_the_last_one_that_took_any(
    prepare: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepare(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("prepare", [completion, chat])
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [40, 41], "logit_bias": {"40": BAN, "41": -99}},
        {"allowed_token_ids": [2]},
        {"allowed_token_ids": [2], "ignore_eos": True, "min_tokens": 1},
        {"allowed_token_ids": [40], "logit_bias": {"40": BAN}, "guided_regex": "a"},
        {"allowed_token_ids": [one_token("a")], "bad_words": ["aa"]},
    ],
)
def test_fields_that_leave_one_token_are_fine(prepare: Any, fields: dict[str, Any]) -> None:
    assert prepare(**fields).sampling


@pytest.mark.parametrize("fields", SCORES)
def test_a_prompt_that_is_only_scored_may_fill_the_window(fields: dict[str, Any]) -> None:
    full = [5] * WINDOW
    assert completion(full, **fields).prompts == (tuple(full),)
    assert completion("a b" * 300, truncate_prompt_tokens=-1, **fields).prompt_tokens == WINDOW
    with pytest.raises(ContextLengthExceeded) as refused:
        completion([5] * (WINDOW + 1), **fields)
    assert refused.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded):
        completion(full, **{**fields, "max_tokens": 1})


def test_an_embedded_text_may_fill_the_window() -> None:
    def embedding(text: Any, **fields: Any) -> GenerateRequest:
        return prepare_embedding(parse(EmbeddingRequest, {"model": "tiny", "input": text, **fields}), served())

    assert embedding([5] * WINDOW).prompt_tokens == WINDOW
    assert embedding("a b" * 300, truncate_prompt_tokens=-1).prompt_tokens == WINDOW
    with pytest.raises(ContextLengthExceeded) as refused:
        embedding([5] * (WINDOW + 1))
    assert refused.value.param == "input"
