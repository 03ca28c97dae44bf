"""Tools on the real model, which has none in its template: what is enforced, and what a client is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests.e2e.conftest import REAL_MODEL
from tests.support.stack import Stack

pytestmark = pytest.mark.real_model

COLOR = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": ["teal"]}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "pick_color", "parameters": COLOR}}
NAMED: Any = {"type": "function", "function": {"name": "pick_color"}}
ASK: Any = [{"role": "user", "content": "color?"}]
AREA: Any = {"id": "call_1", "type": "function", "function": {"name": "area", "arguments": '{"r":2}'}}


@pytest.fixture
def client(real_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real_stack.pods[0].base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(real_stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real_stack.pods[0].base_url, timeout=60, trust_env=False) as client:
        yield client


def fields(choice: Any, **more: Any) -> dict[str, Any]:
    body = {"model": REAL_MODEL, "messages": ASK, "tools": [TOOL], "tool_choice": choice, "temperature": 0}
    return {**body, "max_tokens": 64, **more}


def whole(client: openai.OpenAI, body: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    choice = client.chat.completions.create(**body).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def streamed(client: openai.OpenAI, body: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    content, reason, calls, ids = "", "", [], set()
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for entry in choice.delta.tool_calls or ():
                if entry.id:
                    assert entry.index == len(calls)
                    assert (entry.type, entry.function.arguments) == ("function", "")
                    calls.append([entry.function.name, ""])
                    ids.add(entry.id)
                else:
                    calls[entry.index][1] += entry.function.arguments
    assert len(ids) == len(calls)
    return content, [(name, arguments) for name, arguments in calls], reason


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_tls_02_tls_03_enforced_calls(client: openai.OpenAI, choice: Any, reason: str) -> None:
    body = fields(choice, parallel_tool_calls=False)
    content, calls, finish = whole(client, body)
    assert streamed(client, body) == (content, calls, finish)
    assert (content, finish) == ("", reason)
    [(name, arguments)] = calls
    assert name == "pick_color"
    assert json.loads(arguments) == {"color": "teal"}


@pytest.mark.parametrize("choice", [NAMED, "required", "auto"])
def test_tls_07_a_truncated_call_is_the_same_in_both_modes(client: openai.OpenAI, choice: Any) -> None:
    for limit in range(1, 13, 2):
        body = fields(choice, max_tokens=limit)
        content, calls, finish = whole(client, body)
        assert streamed(client, body) == (content, calls, finish)
        assert "<tool" not in content
        if choice != "auto":
            assert content == ""
            assert finish == "length" or json.loads(calls[0][1])


def test_tls_10_none_calls_nothing(client: openai.OpenAI) -> None:
    content, calls, finish = whole(client, fields("none", max_tokens=16))
    assert (calls, finish in ("stop", "length")) == ([], True)
    assert content


def test_tls_05_06_matrix(http: httpx.Client) -> None:
    for tools in ("absent", None, []):
        for choice in ("absent", None, "none", "auto", "required", NAMED, "maybe"):
            body: dict[str, Any] = {"model": REAL_MODEL, "messages": ASK, "max_tokens": 1}
            body |= {key: value for key, value in (("tools", tools), ("tool_choice", choice)) if value != "absent"}
            harmless = choice in ("absent", None, "none", "auto")
            assert http.post("/chat/completions", json=body).status_code == (200 if harmless else 400), (tools, choice)
    other = {"type": "function", "function": {"name": "no_such"}}
    answer = http.post("/chat/completions", json=fields(other))
    assert answer.status_code == 400
    assert "no_such" in answer.json()["error"]["message"]


def test_msg_02_calls_and_results_of_the_history_reach_the_prompt(http: httpx.Client) -> None:
    def size(turn: dict[str, Any]) -> int:
        messages = [
            ASK[0],
            {"role": "assistant", **turn},
            {"role": "tool", "tool_call_id": "call_1", "content": "12.6"},
        ]
        answer = http.post("/chat/completions", json={"model": REAL_MODEL, "max_tokens": 1, "messages": messages})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    sizes = {size({**content, "tool_calls": [AREA]}) for content in ({"content": None}, {}, {"content": ""})}
    assert len(sizes) == 1
    longer = AREA | {"function": {"name": "area", "arguments": '{"r": 2, "unit": "square metres"}'}}
    assert size({"content": None, "tool_calls": [longer]}) > sizes.pop()
    nothing = {"model": REAL_MODEL, "messages": [ASK[0], {"role": "assistant", "content": None}]}
    assert http.post("/chat/completions", json=nothing).status_code == 400


class Person(pydantic.BaseModel):
    """What the openai package turns into a strict schema."""

    name: str = pydantic.Field(max_length=12)
    friends: Annotated[list[Literal["Ann", "Björn", "日本"]], pydantic.Field(max_length=2)]
    home: Literal["north", "south"] | None


def test_the_openai_clients_parse_helper(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=REAL_MODEL, messages=ASK, response_format=Person, max_tokens=120, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_the_openai_clients_stream_helper_collects_calls(client: openai.OpenAI) -> None:
    body = fields("required", parallel_tool_calls=False)
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    [call] = final.message.tool_calls or []
    assert json.loads(call.function.arguments) == {"color": "teal"}
