"""Structured output on the real model: every finished answer parses, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.conftest import REAL_MODEL
from tests.support.random_schemas import random_schema
from tests.support.stack import Stack

pytestmark = pytest.mark.real_model

CLOSED = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
STUBBORN = {"198": 100, "216": 100, "1116": 100}
"""Newline, space and two newlines before everything else."""
TEXT = '日本🫠 "q" \\ /'


@pytest.fixture
def client(real_stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real_stack.pods[0].base_url, timeout=600, trust_env=False) as client:
        yield client


def wrapped(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": REAL_MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **fields}
    return client.post("/chat/completions", json=body)


def content(response: httpx.Response) -> tuple[str, str]:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def streamed(client: httpx.Client, **fields: Any) -> str:
    body = {"model": REAL_MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **fields}
    with client.stream("POST", "/chat/completions", json=body | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize(
    "schema",
    [{"type": "foo"}, {"enum": []}, {"$ref": "#"}, {"type": "string", "pattern": "("}, True, None, [], "str"],
)
def test_str_01_a_bad_schema_is_refused_and_the_engine_goes_on(client: httpx.Client, schema: Any) -> None:
    before, _ = content(ask(client, max_tokens=4))
    refused = ask(client, max_tokens=4, response_format=wrapped(schema))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("response_format")
    assert content(ask(client, max_tokens=4))[0] == before


def test_str_02_recursion_is_legal(client: httpx.Client) -> None:
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    schema = {"$ref": "#/$defs/n", "$defs": {"n": node}}
    text, finish = content(ask(client, max_tokens=64, response_format=wrapped(schema)))
    assert text.startswith("{")
    if finish == "stop":
        jsonschema.validate(json.loads(text), schema)


def test_str_03_a_hostile_pattern_is_refused(client: httpx.Client) -> None:
    for pattern in ("[a-", "(a{1,100000}){1,1000}"):
        assert ask(client, response_format=wrapped({"type": "string", "pattern": pattern})).status_code == 400
        assert ask(client, guided_regex=pattern).status_code == 400


def test_str_05_white_space_is_bounded_and_the_answer_ends(client: httpx.Client) -> None:
    response = ask(client, max_tokens=256, logit_bias=STUBBORN, response_format=wrapped(CLOSED))
    text, finish = content(response)
    assert finish == "stop"
    assert isinstance(json.loads(text)["a"], bool)
    assert not re.search(r"\s{10,}|\n\s*\n| {9,}", text)
    assert text == text.rstrip()
    assert response.json()["usage"]["completion_tokens"] < 256


def test_str_05_min_tokens_and_a_banned_end_give_way_to_a_complete_answer(client: httpx.Client) -> None:
    fields = {"max_tokens": 200, "min_tokens": 150, "ignore_eos": True, "logit_bias": {"2": -100}}
    text, finish = content(ask(client, response_format=wrapped(CLOSED), **fields))
    assert (finish, list(json.loads(text))) == ("stop", ["a"])


def test_str_06_enforcement_escapes_and_unicode(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [TEXT]}}, "required": ["a"], "additionalProperties": False}
    fields = {"max_tokens": 64, "response_format": wrapped(schema)}
    whole, finish = content(ask(client, **fields))
    assert finish == "stop"
    assert json.loads(whole) == {"a": TEXT}
    assert streamed(client, **fields) == whole
    assert ask(client, response_format={"type": "xml"}).status_code == 400


def test_str_07_the_wrapper_may_be_missing(client: httpx.Client) -> None:
    fields = {
        "max_tokens": 16,
        "response_format": {"type": "json_schema", "schema": {"type": "integer", "maximum": 99}},
    }
    int(content(ask(client, **fields))[0])


def test_vllms_names_are_honoured(client: httpx.Client) -> None:
    assert content(ask(client, guided_choice=["north", "süd 🫠"], max_tokens=32))[0] in ("north", "süd 🫠")
    assert re.fullmatch("[0-9]{3}", content(ask(client, structured_outputs={"regex": "[0-9]{3}"}, max_tokens=9))[0])
    assert content(ask(client, guided_grammar='root ::= "yes" | "no"', max_tokens=9))[0] in ("yes", "no")
    json.loads(content(ask(client, guided_json=CLOSED, max_tokens=60))[0])


def test_several_choices_have_a_grammar_each(client: httpx.Client) -> None:
    response = ask(client, n=3, seed=1, temperature=1.5, max_tokens=60, response_format=wrapped(CLOSED))
    texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert all(isinstance(json.loads(text)["a"], bool) for text in texts)


def test_the_grammar_wins_over_a_ban_that_leaves_nothing_of_it(client: httpx.Client) -> None:
    assert content(ask(client, guided_regex="A", logit_bias={"49": -100}, max_tokens=4)) == ("A", "stop")


def _ask_for_all(client: httpx.Client, seeds: range) -> None:
    """Asks for every schema; each answer ends by itself, parses and validates."""

    def one(seed: int) -> None:
        schema = random_schema(seed)
        sampling = {"temperature": 1.0, "seed": seed, "max_tokens": 300}
        text, finish = content(ask(client, response_format=wrapped(schema), **sampling))
        assert finish == "stop", f"{seed}: {text}"
        jsonschema.validate(json.loads(text), schema)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, seeds))


def test_a_number_without_bounds_ends(client: httpx.Client) -> None:
    for seed in range(4):
        text, finish = content(
            ask(client, temperature=2.0, seed=seed, max_tokens=100, response_format=wrapped({"type": "number"}))
        )
        assert finish == "stop"
        float(json.loads(text))


def test_an_answer_that_does_not_fit_is_shortened_to_a_whole_one(client: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"story": {"type": "string", "minLength": 20}, "ratings": {"type": "array"}},
        "required": ["story", "ratings"],
    }
    asked = [{"role": "user", "content": "Tell me a very long story about a dragon."}]
    fields = {"messages": asked, "logit_bias": {"18": -100}, "response_format": wrapped(schema)}  # no quote: no end
    text, finish = content(ask(client, max_tokens=80, **fields))
    assert finish == "stop"
    jsonschema.validate(json.loads(text), schema)


def test_random_schemas_are_followed(client: httpx.Client) -> None:
    _ask_for_all(client, range(12))


@pytest.mark.soak
def test_200_random_schemas_are_followed(client: httpx.Client) -> None:
    _ask_for_all(client, range(200))
