"""Redis goes away, forgets, or cuts connections: streams wait and go on, new requests hear 503, nobody hangs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from api_service import reachability, relay
from shared.keys import queue_key
from shared.messages import Delta, GenerateRequest
from tests.support.api_pod import RawStream, chat_body, chunks_of, running_pod, texts_of
from tests.support.redis_server import RedisServer
from tests.support.scripted_worker import ScriptedWorker, say, say_each
from tests.support.wait import eventually

CHAT = "/v1/chat/completions"
WORDS = "One two three four five six seven eight"


def words(request: GenerateRequest) -> list[list[Delta]]:
    return say_each([WORDS] * request.num_choices)


async def test_a_restart_is_a_pause_for_streams_and_a_503_for_new_requests(own_redis: RedisServer) -> None:
    async with (
        ScriptedWorker(own_redis.url, words, gated=True) as worker,
        running_pod(own_redis.url) as pod,
        RawStream(pod, CHAT, chat_body(stream=True)) as stream,
    ):
        worker.allow(3)
        events = aiter(stream)
        seen = [await anext(events) for _ in range(4)]
        # everything the client has seen is on disk before the power goes
        with own_redis.client() as client:
            client.config_set("appendfsync", "always")
            client.set("marker", 1, px=60_000)
        own_redis.kill()
        refused = await pod.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_unavailable")
        assert int(refused.headers["retry-after"]) >= 1

        async def not_ready() -> bool:
            return (await pod.client.get("/ready")).status_code == 503

        await eventually(not_ready)
        assert (await pod.client.get("/health")).status_code == 200
        own_redis.start()
        worker.allow_all()
        rest = [event async for event in events]
        assert rest[-1]["data"] == "[DONE]"
        assert texts_of(chunks_of([*seen, *rest])) == {0: WORDS}
        await pod.ready()


async def test_rd_09_flushall_in_mid_stream_loses_nothing(redis_url: str, redis_server: RedisServer) -> None:
    async with (
        ScriptedWorker(redis_url, words, gated=True) as worker,
        running_pod(redis_url) as pod,
        AsyncExitStack() as stack,
    ):
        worker.allow(2)
        streams = [await stack.enter_async_context(RawStream(pod, CHAT, chat_body(stream=True))) for _ in range(3)]
        iterators = [aiter(stream) for stream in streams]
        seen = [[await anext(events) for _ in range(2)] for events in iterators]
        with redis_server.client() as client:
            client.flushall()
        worker.allow_all()
        for events, before in zip(iterators, seen, strict=True):
            after = [event async for event in events]
            assert after[-1]["data"] == "[DONE]"
            assert texts_of(chunks_of([*before, *after])) == {0: WORDS}
        assert "headrace_restores_total 3.0" in (await pod.client.get("/metrics")).text
        assert (await pod.chat()).status_code == 200


async def test_rd_23_a_trimmed_queue_entry_is_queued_again(redis_url: str, redis_server: RedisServer) -> None:
    async with running_pod(redis_url, wait=False) as pod:
        async with ScriptedWorker(redis_url, words):
            await pod.ready()
        async with RawStream(pod, CHAT, chat_body(stream=True)) as stream:
            with redis_server.client() as client:
                assert client.xtrim(queue_key(0, "tiny", "interactive"), maxlen=0) == 1
            async with ScriptedWorker(redis_url, words, consumer="late"):
                events = [event async for event in stream]
        assert texts_of(chunks_of(events)) == {0: WORDS}


async def test_lost_subscriptions_are_filled_from_the_log(redis_url: str, redis_server: RedisServer) -> None:
    async with (
        ScriptedWorker(redis_url, words, gated=True) as worker,
        running_pod(redis_url) as pod,
        RawStream(pod, CHAT, chat_body(stream=True)) as stream,
    ):
        reading = asyncio.ensure_future(_all(stream))
        with redis_server.client() as client:
            for record in range(len(say(WORDS))):
                client.client_kill_filter(_type="pubsub")
                worker.allow(1)
                await eventually(lambda limit=record: _logged(client) > limit)
        worker.allow_all()
        events = await reading
        assert texts_of(chunks_of(events)) == {0: WORDS}
        assert [event["id"].rsplit(":", 1)[1] for event in events[:-1]] == [str(i) for i in range(-1, len(events) - 2)]


def _logged(client: Any) -> int:
    """Records in the one log there is."""
    return sum(client.xlen(key) for key in client.scan_iter("*:log:*"))


async def _all(stream: RawStream) -> list[dict[str, str]]:
    return [event async for event in stream]


FOREVER_S = 1e6


async def test_a_frozen_redis_is_a_503_within_seconds_and_a_pause_for_streams(
    redis_url: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit of the request's own ends the wait: the pod knows that nobody is answered."""
    monkeypatch.setattr(relay, "ACCEPT_TIMEOUT_S", FOREVER_S)
    async with (
        ScriptedWorker(redis_url, words, gated=True) as worker,
        running_pod(redis_url) as pod,
        RawStream(pod, CHAT, chat_body(stream=True)) as stream,
    ):
        worker.allow(1)
        events = aiter(stream)
        seen = [await anext(events) for _ in range(2)]
        redis_server.freeze()
        try:
            for answer in await asyncio.gather(
                pod.chat(),
                pod.chat(deadline_ms=1000),
                pod.client.get(f"/v1/streams/{seen[0]['id'].partition(':')[0]}"),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "redis_unavailable")
                assert 1 <= int(answer.headers["retry-after"]) <= 10
            assert (await pod.client.get("/ready")).json()["reason"] == "redis cannot be reached"
            monkeypatch.setattr(pod.services.relay, "_submit", None)  # now it is known: no try is made
            assert [(await pod.chat(model=name)).status_code for name in ("tiny", "unknown")] == [503, 503]
            assert (await pod.client.get("/v1/models")).status_code == 503
        finally:
            monkeypatch.undo()
            redis_server.thaw()
        worker.allow_all()
        rest = [event async for event in events]
        assert texts_of(chunks_of([*seen, *rest])) == {0: WORDS}


async def test_an_absence_that_is_short_only_delays_new_requests(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "PATIENCE_S", FOREVER_S)
    monkeypatch.setattr(relay, "ACCEPT_TIMEOUT_S", FOREVER_S)
    async with ScriptedWorker(own_redis.url, words), running_pod(own_redis.url) as pod:
        assert (await pod.chat()).status_code == 200, "the pod has the tokenizer"
        own_redis.kill()
        await eventually(lambda: not pod.services.subscriber.connected)
        waiting = asyncio.create_task(pod.chat())
        await eventually(lambda: pod.services.relay.open_streams == 1, what="it waits")
        own_redis.start()
        assert (await waiting).status_code == 200
