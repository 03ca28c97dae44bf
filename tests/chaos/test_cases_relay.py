"""Cases of public bug reports about relays, on the whole stack: clients that vanish, streams that resume, engines that
fail. Named after their ids.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
import struct
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from engine_worker.models.loading.loader import load
from shared.messages import Record
from tests.chaos.conftest import Front
from tests.support.api_pod import RawStream, running_pod
from tests.support.chaos_checks import Books, assert_exact, connected, field_of, read_log
from tests.support.chaos_load import CHAT, Oracle, follow_all
from tests.support.stream_client import Outcome, events, follow
from tests.support.wait import eventually
from tests.support.workers import running_worker

LONG = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 1000, "ignore_eos": True, "stream": True}
GONE_S = 10.0
"""A renewal may have to bring the cancellation; usually it takes a step."""


async def vanish(url: str, after_events: int) -> str:
    """Streams, then drops the connection; the request's id."""
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=LONG) as response,
    ):
        assert response.status_code == 200
        seen = 0
        async for event in events(response):
            seen += 1
            if seen > after_events:
                return event["id"].rsplit(":", 1)[0]
    raise AssertionError("the stream ended by itself")


async def ended_aborted(front: Front, rids: list[str], within_s: float = GONE_S) -> None:
    """All of them have ended, long before their limit, and no block is in use for them."""
    await eventually(
        lambda: all(field_of(front.server, rid, "state") == "done" for rid in rids), within_s, what="all are ended"
    )
    for rid in rids:
        records = read_log(front.server, rid)
        assert [d.finish_reason for d in records[-1].deltas] == ["abort"]
        assert sum(len(d.token_ids) for record in records for d in record.deltas) < LONG["max_tokens"]


async def blocks_are_free(front: Front) -> None:
    def free() -> bool:
        card = front.wide.card()
        return card is not None and card.running == 0 and card.kv_blocks_used == 0

    await eventually(free, 10, interval=0.05, what="every block is free")


@pytest.mark.timeout(90)
async def test_rl_24_rl_29_sc_15_half_of_the_clients_vanish_and_the_others_get_all(
    front: Front, oracle: Oracle
) -> None:
    """More streams than a pod has connections to Redis: none of them holds one."""
    expected, rng = await oracle.expected(50, (20, 60)), random.Random(5)
    books, outcomes = Books.open(front.server), [Outcome() for _ in expected]
    url = front.roomy.url
    staying = asyncio.create_task(follow_all([url], expected, outcomes=outcomes))
    rids = await asyncio.gather(*(vanish(url, rng.randrange(12)) for _ in range(50)))
    await ended_aborted(front, list(rids))
    assert_exact(expected, await staying)
    assert [outcome.reconnects for outcome in outcomes] == [0] * len(outcomes)
    await books.settle(outcomes, others=len(rids))
    await blocks_are_free(front)
    with connected(front.server) as client:
        await eventually(
            lambda: [name for name in client.pubsub_channels("*") if b":chan:" in name] == [],
            10,
            what="nobody listens to what has ended",
        )


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("end", ["fin", "rst"])
async def test_rl_25_a_closed_socket_ends_its_request(front: Front, end: str, stream: bool) -> None:
    """Real sockets to a real server: a watcher that loses a race shows only there."""
    books = Books.open(front.server)
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", front.roomy.port)) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        await eventually(lambda: _running(front, books), 10, what="it runs")
        [rid] = _running(front, books)
        if end == "rst":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await ended_aborted(front, [rid])
    await books.settle([], others=1)
    await blocks_are_free(front)


def _running(front: Front, books: Books) -> list[str]:
    with connected(front.server) as client:
        rids = {key.decode().rsplit(":", 1)[1] for key in client.scan_iter(match="*:log:*", count=1000)}
    return sorted(rids - books.known)


async def test_rl_07_every_record_is_one_event(front: Front, oracle: Oracle) -> None:
    expected = await oracle.expected(8, (20, 40))
    done = await follow_all([pod.url for pod in front.stack.pods], expected)
    assert_exact(expected, done)
    for answer, outcome in zip(expected, done, strict=True):
        assert isinstance(outcome, Outcome)
        records = read_log(front.server, outcome.rid)
        numbers = [-1] if answer.load.path == CHAT else []
        numbers += [record.seq for record in records if _is_shown(record)] + [len(records)]
        assert outcome.ids == [f"{outcome.rid}:{number}" for number in numbers]


def _is_shown(record: Record) -> bool:
    """Text may be held back while a character or a stop string is undecided."""
    return any(delta.text or delta.finish_reason for delta in record.deltas)


async def test_rl_09_the_openai_client_reads_a_stream_resumed_at_any_event(front: Front) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "ignore_eos": True}
    whole = await follow(lambda: [front.roomy.url], CHAT, {**body, "temperature": 0})
    async with openai.AsyncOpenAI(base_url=front.strict.base_url, api_key="none", max_retries=0) as client:
        replayed = await _rest(client, whole.rid, "")
        rests = [await _rest(client, whole.rid, event_id) for event_id in whole.ids[:-1]]
    assert replayed == rests[0] == whole.texts[0], "without a cursor, and after the opening, all of it comes again"
    assert all(whole.texts[0].endswith(rest) for rest in rests)
    assert [len(rest) for rest in rests] == sorted((len(rest) for rest in rests), reverse=True)


async def _rest(client: openai.AsyncOpenAI, rid: str, after: str) -> str:
    headers = {"Last-Event-ID": after} if after else {}
    stream: openai.AsyncStream[ChatCompletionChunk] = await client.get(
        f"/streams/{rid}",
        cast_to=ChatCompletionChunk,
        options={"headers": headers},
        stream=True,
        stream_cls=openai.AsyncStream[ChatCompletionChunk],
    )
    return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])


class _FailsLate:
    """The tiny model until a sequence is longer than `limit` tokens."""

    def __init__(self, model: Any, limit: int) -> None:
        self._model = model
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, token_ids: Any, layout: Any, kv_cache: Any, sample_at: Any, wanted: Any) -> Any:
        if layout.max_seq_len > self._limit:
            raise RuntimeError("kernel fault")
        return self._model.forward(token_ids, layout, kv_cache, sample_at, wanted)


async def test_rl_12_rl_13_an_engine_that_fails_at_the_third_token_is_one_error_event(
    redis_url: str, tiny: Path
) -> None:
    loaded = load(str(tiny), dtype="float32", device="cpu")
    broken = dataclasses.replace(loaded, model=_FailsLate(loaded.model, 6))
    body = {"model": "tiny", "prompt": [10, 11, 12, 13], "max_tokens": 20, "stream": True, "ignore_eos": True}
    async with running_worker(redis_url, broken), running_pod(redis_url) as pod:
        async with RawStream(pod, "/v1/completions", body) as stream:
            seen = [event async for event in stream]
        error = json.loads(seen[-1]["data"])["error"]
        assert error["code"] == "engine_failure"
        assert error["request_id"] == seen[0]["id"].split(":")[0]
        assert b"[DONE]" not in stream.raw
        assert 1 < len(seen) <= 4, "three tokens, in one record or more, and the error"
        whole = await pod.post("/v1/completions", {**body, "stream": False})
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_failure")
        canary = await pod.post("/v1/completions", {**body, "stream": False, "max_tokens": 2})
        assert canary.status_code == 200
