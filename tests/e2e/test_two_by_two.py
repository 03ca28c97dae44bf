"""Two pods, two workers, one Redis: 32 streams at once over both pods, each equal to its solo run; nothing is left."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.conftest import assert_only_queues_without_ttl
from tests.e2e.conftest import REAL_MODEL
from tests.support.chaos_load import Expected, Load, make_bodies, undisturbed
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack
from tests.support.stream_client import Outcome, follow
from tests.support.wait import eventually

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(240)]

STREAMS = 32
WORDS = ["water", "wheel", "river", "the", "story", "of", "a", "mill", "naïve", "水车", "🌊", "1234", "\n"]


async def test_concurrent_streams_equal_their_solo_runs(real_stack: Stack, real_redis: RedisServer) -> None:
    loads = make_bodies(STREAMS, REAL_MODEL, seed=5, max_tokens=(8, 24), words=WORDS)
    solo = await undisturbed(real_stack.pods[0].url, loads, concurrency=1)

    outcomes = await asyncio.gather(*(_stream(real_stack, e, i) for i, e in enumerate(solo)))

    for expected, outcome in zip(solo, outcomes, strict=True):
        assert outcome.error is None
        assert outcome.texts == expected.texts, expected.load
        assert outcome.finish == expected.finish
        assert outcome.usage is not None
        assert outcome.usage["completion_tokens"] == expected.usage["completion_tokens"]
    await eventually(lambda: _used_blocks(real_stack) == 0, 10, what="all blocks are free")
    _assert_queue_is_empty(real_redis)
    assert_only_queues_without_ttl(real_redis)


async def _stream(stack: Stack, expected: Expected, number: int) -> Outcome:
    pod = stack.pods[number % 2].url
    return await follow(lambda: [pod], expected.load.path, expected.load.body)


def _used_blocks(stack: Stack) -> int:
    cards = [worker.card() for worker in stack.workers]
    return sum(card.kv_blocks_used + card.running + card.waiting for card in cards if card is not None)


def _assert_queue_is_empty(redis: RedisServer) -> None:
    client = redis.client()
    try:
        for queue in client.scan_iter(match="*:queue:*"):
            assert client.xlen(queue) == 0
            assert [group["pending"] for group in client.xinfo_groups(queue)] == [0]
    finally:
        client.close()


BAD: dict[str, tuple[str, bytes | dict[str, Any], int, str | None]] = {
    "not json": ("chat/completions", b"{", 400, None),
    "not an object": ("chat/completions", b"[1]", 400, None),
    "invalid utf-8": ("completions", b'{"prompt": "\xff"}', 400, None),
    "unknown model": ("completions", {"model": "nope", "prompt": "x"}, 404, "model"),
    "no model": ("completions", {"prompt": "x"}, 400, "model"),
    "empty prompt": ("completions", {"prompt": ""}, 400, "prompt"),
    "prompt of no tokens": ("completions", {"prompt": "\x04"}, 400, "prompt"),
    "empty messages": ("chat/completions", {"messages": []}, 400, "messages"),
    "prompt too long": ("completions", {"prompt": "a " * 9000}, 400, "prompt"),
    "token id negative": ("completions", {"prompt": [-1]}, 400, "prompt"),
    "token id too large": ("completions", {"prompt": [49152]}, 400, "prompt"),
    "second prompt empty": ("completions", {"prompt": [[49], []]}, 400, "prompt[1]"),
    "temperature NaN": ("completions", b'{"model": "%s", "prompt": "x", "temperature": NaN}', 400, "temperature"),
    "temperature infinite": (
        "completions",
        b'{"model": "%s", "prompt": "x", "temperature": 1e999}',
        400,
        "temperature",
    ),
    "temperature too high": ("completions", {"prompt": "x", "temperature": 2.5}, 400, "temperature"),
    "top_p too high": ("completions", {"prompt": "x", "top_p": 1.5}, 400, "top_p"),
    "top_k too low": ("completions", {"prompt": "x", "top_k": -2}, 400, "top_k"),
    "n zero": ("completions", {"prompt": "x", "n": 0}, 400, "n"),
    "n huge": ("completions", {"prompt": "x", "n": 1_000_000}, 400, "n"),
    "max_tokens negative": ("completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    "max_tokens beyond the window": ("completions", {"prompt": "x", "max_tokens": 9000}, 400, "max_tokens"),
    "stop token outside": ("completions", {"prompt": "x", "stop_token_ids": [60001]}, 400, "stop_token_ids"),
    "bias outside": ("completions", {"prompt": "x", "logit_bias": {"60000": 1}}, 400, "logit_bias"),
    "seed outside int64": ("completions", {"prompt": "x", "seed": 2**63}, 400, "seed"),
}


async def test_bad_input_is_refused_by_name_and_harms_nobody(real_stack: Stack, real_redis: RedisServer) -> None:
    """While four neighbours run, each bad request gets its 4xx; the neighbours' texts and the queue do not notice."""
    neighbours = [
        Load("/v1/completions", {"model": REAL_MODEL, "prompt": f"Story {i}:", "max_tokens": 40, "temperature": 0})
        for i in range(4)
    ]
    url = real_stack.pods[0].url
    alone = await undisturbed(url, neighbours)
    added = _entries_added(real_redis)
    running = asyncio.gather(*(follow(lambda: [url], n.path, n.body) for n in neighbours))

    async with httpx.AsyncClient(timeout=10) as client:
        for name, (path, body, status, param) in BAD.items():
            content = body.replace(b"%s", REAL_MODEL.encode()) if isinstance(body, bytes) else None
            json = {"model": REAL_MODEL, **body} if isinstance(body, dict) else None
            if name == "no model":
                json = body
            headers = {"Content-Type": "application/json"}
            response = await client.post(f"{url}/v1/{path}", content=content, json=json, headers=headers)
            error = response.json()["error"]
            assert response.status_code == status, (name, response.text)
            assert {"message", "type", "param", "code"} == set(error), name
            assert error["param"] == param, (name, error)
            assert len(response.content) < 16_384

    for expected, outcome in zip(alone, await running, strict=True):
        assert outcome.texts == expected.texts
    assert _entries_added(real_redis) == added + len(neighbours)


def _entries_added(redis: RedisServer) -> int:
    client = redis.client()
    try:
        return sum(client.xinfo_stream(queue)["entries-added"] for queue in client.scan_iter(match="*:queue:*"))
    finally:
        client.close()
