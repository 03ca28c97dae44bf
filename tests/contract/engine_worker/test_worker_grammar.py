"""Structured output through whole workers: moved from worker to worker at any token, refused where it cannot be."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import pytest
from redis.asyncio import Redis

from engine_worker.models.base import LoadedModel
from shared.messages import Reading
from shared.params import GrammarSpec, SamplingParams, StopConditions
from shared.text.token_bytes import TokenBytes
from tests.support.records import make_request
from tests.support.workers import ask, finished, running_worker, submit, until_logged

SLOW = "step-delay-ms:15"
FOR_EVER = 3_600_000
SCHEMA = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"enum": ["é", "🫠", "x"]}, "minItems": 3, "maxItems": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["list", "n"],
    "additionalProperties": False,
}
SPEC = GrammarSpec("json_schema", json.dumps(SCHEMA))
SAMPLING = SamplingParams(temperature=1.0, seed=11, min_tokens=8, repetition_penalty=1.1, grammar=SPEC)


async def test_rl_16_ops_10_a_move_after_any_token_gives_the_same_json(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    fields = {"sampling": SAMPLING, "n": 2, "max_tokens": 160}
    async with running_worker(redis_url, tiny):
        whole = await ask(redis, make_request(**fields))
    texts = [whole.text(0), whole.text(1)]
    assert whole.last(0).finish_reason == "stop"
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    request = make_request(**fields)
    await submit(redis, request)
    records, moves = 1, 0
    while True:
        async with running_worker(redis_url, tiny, fault=SLOW, lease_ms=FOR_EVER):
            answer = await until_logged(redis, request.rid, records)
            if any(record.end is not None for record in answer.records):
                break
            records, moves = len(answer.records) + 2, moves + 1
            if moves > 12:  # often enough; the rest in one go
                answer = await finished(redis, request.rid)
                break
    assert moves > 3
    assert [answer.text(0), answer.text(1)] == texts
    assert answer.end.usage.completion_tokens == whole.end.usage.completion_tokens


async def test_a_stop_string_ends_an_answer_before_its_grammar_does(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    stop = StopConditions(max_tokens=160, stop=('"list"',))
    async with running_worker(redis_url, tiny):
        answer = await ask(redis, make_request(sampling=replace(SAMPLING, min_tokens=0), stop=stop))
    assert answer.last().stop_reason == '"list"'
    assert answer.text().strip() == "{"


@pytest.mark.parametrize("spec", [GrammarSpec("regex", "("), GrammarSpec("json_schema", '{"type": "foo"}')])
async def test_str_01_a_grammar_that_no_pod_checked_fails_alone(
    redis: Redis, redis_url: str, tiny: LoadedModel, spec: GrammarSpec
) -> None:
    async with running_worker(redis_url, tiny):
        answer = await ask(redis, make_request(sampling=SamplingParams(temperature=0.0, grammar=spec)))
        assert answer.end.code == "invalid_value"
        assert "grammar" in answer.end.message
        good = await ask(redis, make_request())
        assert good.end.code == ""


async def test_reasoning_tokens_are_counted_up_to_the_closing_tag(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    """The grammar makes the model think, so that it is known what it says; the count is taken again from the tokens."""
    spec = GrammarSpec("regex", "[a-z ]{12}</think>[A-Z]{6}")
    table = TokenBytes.from_tokenizer_json(tiny.tokenizer_json)
    request = make_request(
        sampling=SamplingParams(temperature=1.0, seed=3, grammar=spec),
        n=2,
        max_tokens=90,
        reading=Reading(think="open"),
    )
    async with running_worker(redis_url, tiny):
        answer = await ask(redis, request)
    expected = 0
    for index in range(2):
        said = b""
        for token in answer.tokens(index):
            if b"</think>" not in said:
                expected += 1
            said += table.bytes_of(token)
        assert re.fullmatch("[a-z ]{12}</think>[A-Z]{6}", answer.text(index))
    assert answer.end.usage.reasoning_tokens == expected
    assert sum(delta.reasoning for record in answer.records for delta in record.deltas) == expected
