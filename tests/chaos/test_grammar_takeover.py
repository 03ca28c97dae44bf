"""Structured output while the workers that write it are killed: the same answer as undisturbed, and a valid one.

Given answers bound by a grammar (JSON schema, pattern, choice, grammar text, enforced calls), streamed and whole, when
their workers get SIGKILL in the middle of them, then whoever takes over has the grammar where the dead one had it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.chaos.conftest import Arena, make_arenas
from tests.support.chaos_checks import field_of
from tests.support.random_schemas import random_schema
from tests.support.redis_server import RedisServer
from tests.support.renewed import Renewed
from tests.support.stack import Stack, Worker
from tests.support.wait import eventually

ENV = {"HEADRACE_LEASE_MS": "2000", "HEADRACE_FAULT": "step-delay-ms:40", "HEADRACE_DTYPE": "float32"}
SCHEMA = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"$ref": "#/$defs/word"}, "minItems": 14, "maxItems": 16},
        "in": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": -99, "maximum": 99}, "é": {"type": "boolean"}},
            "required": ["n", "é"],
            "additionalProperties": False,
        },
    },
    "required": ["list", "in"],
    "additionalProperties": False,
    "$defs": {"word": {"enum": ["été", "🫠", "x", None, 2.5]}},
}
PATTERN = r"([a-f]{3}-[0-9]{2};){14}(日本|ende)"
CHOICES = [f"{number} " + "the wheel turns by day and the mill grinds by night, 水车 " * 2 for number in range(4)]
LARK = 'start: "<" item{20,22} ">"\nitem: "ab" | "cd" | /[0-9]/'
TOOL = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
Valid = Callable[[str], Any]


@dataclass
class Asked:
    """One request, how to tell that an answer is valid, and what came."""

    body: dict[str, Any]
    valid: Valid
    answers: list[dict[str, Any]] = field(default_factory=list)
    events: int = 0
    rid: str = ""


def _json(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def _calls(text: str) -> None:
    calls = json.loads(text)
    assert calls
    for call in calls:
        assert call["name"] == "pick"
        _json(call["arguments"])


def _matches(pattern: str) -> Valid:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def requests_of(model: str) -> list[Asked]:
    """Every kind of grammar, once streamed and once whole."""
    kinds: list[tuple[dict[str, Any], Valid]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, _json),
        ({"guided_regex": PATTERN}, _matches(PATTERN)),
        ({"structured_outputs": {"choice": CHOICES}}, _matches("|".join(map(re.escape, CHOICES)))),
        ({"guided_grammar": LARK}, _matches("<(ab|cd|[0-9]){20,22}>")),
        ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, _calls),
    ]
    asked = []
    for number, (fields, valid) in enumerate([*kinds, *kinds]):
        body = {"model": model, "messages": [{"role": "user", "content": f"Go {number}"}], "max_tokens": 400, **fields}
        body |= {"temperature": 1.0, "seed": number, "n": 2 if number % 3 == 0 else 1, "stream": number < len(kinds)}
        asked.append(Asked(body, valid))
    return asked


async def ask(client: httpx.AsyncClient, asked: Asked) -> None:
    """Appends the answer: text (or calls) and finish reason by choice, and the number of tokens."""
    options = {"stream_options": {"include_usage": True}} if asked.body["stream"] else {}
    texts: dict[int, str] = {}
    calls: dict[int, list[dict[str, str]]] = {}
    reasons: dict[int, str] = {}
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/chat/completions", json=asked.body | options) as response:
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines() if asked.body["stream"] else _whole(response)
        async for line in lines:
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            asked.events += 1
            asked.rid = chunk["id"].removeprefix("chatcmpl-")
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                said = choice.get("delta") or choice.get("message") or {}
                index = choice["index"]
                texts[index] = texts.get(index, "") + (said.get("content") or "")
                for call in said.get("tool_calls", ()):
                    if "id" in call:
                        calls.setdefault(index, []).append({"name": call["function"]["name"], "arguments": ""})
                    calls[index][-1]["arguments"] += call["function"]["arguments"]
                if choice["finish_reason"]:
                    reasons[index] = choice["finish_reason"]
    told = {index: json.dumps(calls[index]) if index in calls else text for index, text in texts.items()}
    asked.answers.append({"told": told, "reasons": reasons, "tokens": usage["completion_tokens"]})


async def _whole(response: httpx.Response) -> Any:
    yield f"data: {(await response.aread()).decode()}"


def check(all_asked: list[Asked]) -> None:
    for asked in all_asked:
        undisturbed, disturbed = asked.answers
        assert disturbed == undisturbed
        for index, text in disturbed["told"].items():
            if disturbed["reasons"][index] != "length":
                asked.valid(text)


@pytest.fixture(scope="module")
def arenas(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renewed[Arena]]:
    yield from make_arenas(tmp_path_factory.mktemp("logs"), tiny, workers=2, worker_env=ENV)


def is_done(server: RedisServer, asked: Asked) -> bool:
    return field_of(server, asked.rid, "state") == "done"


def owns(server: RedisServer, asked: Asked, worker: Worker) -> bool:
    """And it has not ended."""
    return not is_done(server, asked) and field_of(server, asked.rid, "holder") == worker.worker_id


def epoch(server: RedisServer, asked: Asked) -> int:
    return int(field_of(server, asked.rid, "epoch") or 0)


async def test_an_answer_is_valid_and_the_same_after_two_deaths(server: RedisServer, stack: Stack) -> None:
    all_asked = requests_of("tiny")
    streamed = [asked for asked in all_asked if asked.body["stream"]]
    async with httpx.AsyncClient(base_url=stack.pods[0].base_url, timeout=100, trust_env=False) as client:
        await asyncio.gather(*(ask(client, asked) for asked in all_asked))
        for asked in all_asked:
            asked.events, asked.rid = 0, ""
        running = asyncio.gather(*(ask(client, asked) for asked in all_asked))
        try:
            await eventually(lambda: all(asked.events > 4 for asked in streamed), 40, what="every stream speaks")
            first = max(stack.workers, key=lambda worker: sum(owns(server, asked, worker) for asked in streamed))
            [second] = [worker for worker in stack.workers if worker is not first]
            first.kill()
            await eventually(
                lambda: all(is_done(server, asked) or owns(server, asked, second) for asked in streamed),
                30,
                what="the second has all that is left",
            )
            await first.restarted()
            second.kill()
            await running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
    check(all_asked)
    assert not any("length" in asked.answers[1]["reasons"].values() for asked in all_asked), "all are complete"
    assert sum(epoch(server, asked) > 1 for asked in all_asked) >= 2, "too few were in the middle of an answer"
    await second.restarted()


@pytest.mark.soak
@pytest.mark.real_model
@pytest.mark.timeout(1500)
async def test_random_schemas_on_the_real_model_while_workers_die_one_after_the_other(tmp_path: Path) -> None:
    model, count = "SmolLM2-135M-Instruct", 40
    env = ENV | {"HEADRACE_FAULT": "", "HEADRACE_KV_CACHE_MEMORY": "384M"}

    def valid(schema: dict[str, Any]) -> Valid:
        return lambda text: jsonschema.validate(json.loads(text), schema)

    all_asked = requests_of(model)
    for seed in range(count):
        schema = random_schema(seed)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": model, "messages": [{"role": "user", "content": f"Hi {seed}"}], "response_format": form}
        body |= {"temperature": 1.0, "seed": seed, "max_tokens": 160, "stream": seed % 2 == 0}
        all_asked.append(Asked(body, valid(schema)))
    with RedisServer() as server, Stack(server.url, workers=2, worker_env=env, log_dir=tmp_path) as stack:
        async with httpx.AsyncClient(base_url=stack.pods[0].base_url, timeout=900, trust_env=False) as client:
            await asyncio.gather(*(ask(client, asked) for asked in all_asked))
            running = asyncio.gather(*(ask(client, asked) for asked in all_asked))
            deaths = 0
            while not running.done():
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.shield(running), 2)
                    break
                victim = stack.workers[deaths % 2]
                victim.kill()
                deaths += 1
                await victim.restarted()
            await running
        assert deaths >= 3
        epochs = [epoch(server, asked) for asked in all_asked if asked.rid]
        assert sum(number > 1 for number in epochs) > count // 4
    check(all_asked)
