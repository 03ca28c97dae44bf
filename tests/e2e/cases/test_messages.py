"""Cases of kinds messages and errors: forms of chats, error bodies, models, headers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.api_cases import CHAT, MODEL, TEXT, body_of, force, post, refused, whole
from tests.support.bad_messages import BAD_MESSAGES
from tests.support.stack import Stack

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(120)]
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])
USER = {"role": "user", "content": "x"}


def prompt_tokens(url: str, messages: list[dict[str, Any]], **fields: Any) -> int:
    count: int = whole(url, CHAT, messages=messages, max_tokens=1, **fields)["usage"]["prompt_tokens"]
    return count


def prompt_text(url: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    ids = post(url, "/tokenize", {"model": MODEL, "messages": messages, **fields}).json()["tokens"]
    text: str = post(url, "/detokenize", {"model": MODEL, "tokens": ids}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        *BAD_MESSAGES,
        ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_msg_03_err_02_messages_that_are_none(url: str, messages: Any, param: str, streamed: bool) -> None:
    refused(post(url, CHAT, body_of(CHAT, messages=messages, stream=streamed)), param)


def test_msg_04_roles_in_any_order(url: str) -> None:
    def chat(role: str) -> list[dict[str, Any]]:
        turns = (("user", "a"), ("user", "b"), ("system", "c"), (role, "d"), ("user", "e"))
        return [{"role": r, "content": text} for r, text in turns]

    assert prompt_tokens(url, chat("developer")) == prompt_tokens(url, chat("system"))


def test_msg_05_unknown_keys_change_nothing(url: str) -> None:
    noisy = {**USER, "name": "ann", "id": 7, "opts": {"v": 1}, "cache_control": {"type": "ephemeral"}}
    extra = {"foo": {"a": 1}, "metadata": {"k": "v"}, "store": False, "service_tier": "auto"}
    response = post(url, CHAT, body_of(CHAT, messages=[noisy], **extra))
    clean = whole(url, CHAT, messages=[USER])
    assert response.json()["choices"] == clean["choices"]
    assert response.json()["usage"]["prompt_tokens"] == clean["usage"]["prompt_tokens"]
    assert response.headers["x-ignored-params"] == "foo, metadata"


def test_msg_06_a_prefill_keeps_its_white_space(url: str) -> None:
    chat = [{"role": "user", "content": "List two"}, {"role": "assistant", "content": "Sure:\n "}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_text(url, chat, **flags).endswith("assistant\nSure:\n ")
    assert prompt_tokens(url, chat, **flags) > 0
    both = body_of(CHAT, messages=chat, continue_final_message=True, add_generation_prompt=True)
    refused(post(url, CHAT, both), "continue_final_message")
    refused(post(url, CHAT, body_of(CHAT, messages=[USER], **flags)), "continue_final_message")


def test_msg_07_an_assistant_turn_at_the_end_is_answered_by_a_new_one(url: str) -> None:
    text = prompt_text(url, [USER, {"role": "assistant", "content": "Dear "}])
    assert text.endswith("<|im_start|>assistant\n")


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"123",
    b'"s"',
    b'{"a":1',
    b'{"model":"m"} x',
    '{"model":"m"}'.encode("utf-16"),
    b'{"model":"\xff"}',
    b"[1,2,3]",
]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/embeddings", "/tokenize", "/detokenize"])
def test_err_03_bodies_that_are_no_objects(url: str, path: str) -> None:
    for raw in BODIES:
        refused(post(url, path, raw=raw), None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("top_p", []),
        ("n", "1"),
        ("stop", {}),
        ("stream", "yes"),
        ("logit_bias", 5),
        ("seed", "x"),
        ("max_tokens", {}),
        ("model", 5),
        ("presence_penalty", None if False else "a"),
        ("top_k", 1.5),
        ("min_p", 2),
    ],
)
@BOTH
def test_err_02_wrong_types_name_their_field(url: str, path: str, field: str, value: Any) -> None:
    refused(post(url, path, body_of(path, **{field: value})), field)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/x-www-form-urlencoded", 415),
        ("text/plain", 415),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/vnd.api+json", 200),
        (None, 200),
    ],
)
def test_err_04_content_types(url: str, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    content = json.dumps(body_of(CHAT, max_tokens=1)).encode()
    response = httpx.post(url + CHAT, content=content, headers=headers, timeout=60)
    assert response.status_code == status
    if status == 415:
        assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/embeddings", "/tokenize"])
def test_err_05_unknown_models(url: str, path: str) -> None:
    body = {"input": "x", **body_of(path if path == CHAT else TEXT), "model": "no-such-model"}
    response = post(url, path, body)
    refused(response, "model", 404)
    assert response.json()["error"]["code"] == "model_not_found"
    assert MODEL in response.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models/no-such-model").status_code == 404
    without = post(url, path, {key: value for key, value in body.items() if key != "model"})
    if path == "/tokenize":  # as vLLM does, where one model is served
        assert without.status_code == 200
    else:
        refused(without, "model")


def test_ops_08_models_are_the_same_everywhere(url: str, real_stack: Stack) -> None:
    lists = [httpx.get(f"{pod.url}/v1/models").json() for pod in real_stack.pods for _ in range(2)]
    assert all(one == lists[0] for one in lists)
    [entry] = lists[0]["data"]
    assert lists[0]["object"] == "list"
    assert entry["created"] > 0
    assert (entry["object"], entry["max_model_len"]) == ("model", 8192)
    assert httpx.get(f"{url}/v1/models/{entry['id']}").json() == entry
    assert whole(url, CHAT, model=entry["id"], max_tokens=1, **force(905))["model"] == entry["id"]
