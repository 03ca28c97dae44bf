"""A client that goes away ends its request, streamed or not, queued or running; nothing of it is left behind."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from api_service import delivery
from shared.messages import Delta, GenerateRequest
from shared.queue import RequestQueue
from tests.support.api_pod import ApiPod, RawStream, chat_body, running_pod
from tests.support.scripted_worker import ScriptedWorker, say_each
from tests.support.wait import eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def words(request: GenerateRequest) -> list[list[Delta]]:
    return say_each(["One two three four five"] * request.num_choices)


def _head(path: str, body: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: pod", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def post_and_vanish(pod: ApiPod, path: str, body: bytes, ready: asyncio.Event) -> None:
    """A raw socket that sends a request and is reset when `ready` is set, without reading."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
    writer.write(_head(path, body) + body)
    await writer.drain()
    await ready.wait()
    writer.transport.abort()
    del reader


async def nothing_left(pod: ApiPod, redis: Redis) -> None:
    """Permits, relay tasks and subscriptions are gone."""

    async def clean() -> bool:
        relay = pod.services.relay
        idle = pod.services.admission.active == 0 and not relay._streams and not relay._listening
        return idle and await redis.pubsub_channels("*") == []

    await eventually(clean, what="nothing of the streams is left")


@pytest.mark.parametrize("n", [1, 4])
async def test_rl_24_abt_04_a_running_stream_is_cancelled(redis_url: str, redis: Redis, n: int) -> None:
    async with ScriptedWorker(redis_url, words, gated=True) as worker, running_pod(redis_url) as pod:
        worker.allow(2)
        async with RawStream(pod, CHAT, chat_body(stream=True, n=n)) as stream:
            events = aiter(stream)
            first = [await anext(events) for _ in range(3)]
        rid = first[0]["id"].split(":")[0]
        await eventually(lambda: worker.cancelled == [rid], 2, what="the worker stopped")
        await nothing_left(pod, redis)
        text = (await pod.client.get("/metrics")).text
        assert 'headrace_requests_total{finished_reason="abort",model_name="tiny"} 1.0' in text  # ABT-08


async def test_abt_02_a_whole_answer_is_cancelled_too(redis_url: str, redis: Redis) -> None:
    async with ScriptedWorker(redis_url, words, gated=True) as worker, running_pod(redis_url) as pod:
        gone = asyncio.Event()
        body = b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}]}'
        client = asyncio.create_task(post_and_vanish(pod, CHAT, body, gone))
        await eventually(lambda: len(worker.requests) == 1)
        gone.set()
        await client
        await eventually(lambda: worker.cancelled == [worker.requests[0].rid], 2, what="the worker stopped")
        await nothing_left(pod, redis)


async def test_abt_06_queued_requests_of_dead_clients_never_start(redis_url: str, redis: Redis) -> None:
    async with running_pod(redis_url, wait=False) as pod:
        async with ScriptedWorker(redis_url, words):
            await pod.ready()
        streams = [RawStream(pod, CHAT, chat_body(stream=True)) for _ in range(5)]
        gone = asyncio.Event()
        body = b'{"model":"tiny","prompt":["a","b"]}'
        whole = [asyncio.create_task(post_and_vanish(pod, TEXT, body, gone)) for _ in range(5)]
        for stream in streams:
            await stream.__aenter__()
        queue = RequestQueue(redis)

        async def waiting() -> int:
            return (await queue.depth("tiny")).waiting

        async def all_wait() -> bool:
            return await waiting() == 10

        async def none_waits() -> bool:
            return await waiting() == 0

        await eventually(all_wait)
        gone.set()
        for stream in streams:
            await stream.cut()
        await asyncio.gather(*whole)
        await eventually(none_waits, 3, what="the queue is empty")
        await nothing_left(pod, redis)
        async with ScriptedWorker(redis_url, words, consumer="late") as worker:
            assert (await pod.chat()).status_code == 200
            assert len(worker.requests) == 1


async def test_a_request_that_keeps_running_is_picked_up_again(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, words, gated=True) as worker, running_pod(redis_url) as pod:
        worker.allow(1)
        async with RawStream(pod, CHAT, chat_body(stream=True), **{"X-Headrace-Keep-Running": "30"}) as stream:
            events = aiter(stream)
            role = await anext(events)
        await eventually(lambda: pod.services.admission.active == 0)
        worker.allow_all()
        rest = await pod.stream(f"/v1/streams/{role['id'].split(':')[0]}", **{"Last-Event-ID": role["id"]})
        assert rest[-1]["data"] == "[DONE]"
        assert worker.cancelled == []


async def test_keep_running_ends_after_its_time(redis_url: str, redis: Redis) -> None:
    async with ScriptedWorker(redis_url, words, gated=True) as worker, running_pod(redis_url) as pod:
        async with RawStream(pod, CHAT, chat_body(stream=True), **{"X-Headrace-Keep-Running": "0.3"}) as stream:
            events = aiter(stream)
            await anext(events)
        await eventually(lambda: len(worker.cancelled) == 1, 5, what="the grace time ended")
        await nothing_left(pod, redis)
        bad = await pod.post(CHAT, chat_body(), **{"X-Headrace-Keep-Running": "soon"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "X-Headrace-Keep-Running")


async def test_rl_28_a_client_that_reads_nothing_is_let_go(
    redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "SEND_LIMIT_S", 0.5)

    def flood(_: GenerateRequest) -> list[list[Delta]]:
        return [[Delta(token_ids=(5,), text="x" * 100_000)] for _ in range(400)] + [[Delta(finish_reason="stop")]]

    async with ScriptedWorker(redis_url, flood, gated=True) as worker, running_pod(redis_url, keepalive_s=0.4) as pod:
        reader, writer = await asyncio.open_connection("127.0.0.1", pod.port, limit=1024)
        body = b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"stream":true}'
        writer.write(_head(CHAT, body) + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        worker.allow(300)
        await eventually(lambda: len(worker.cancelled) == 1, 15, what="the stalled client was given up")
        await nothing_left(pod, redis)
        writer.transport.abort()


async def test_rl_04_many_streams_leave_no_connection_behind(redis_url: str, redis: Redis) -> None:
    async with ScriptedWorker(redis_url, words) as worker, running_pod(redis_url) as pod:
        await pod.chat()
        before = (await redis.info("clients"))["connected_clients"]

        async def one(number: int) -> None:
            stream = RawStream(pod, CHAT, chat_body(stream=True))
            await stream.__aenter__()
            if number % 2:
                events = [event async for event in stream]
                assert events[-1]["data"] == "[DONE]"
            await stream.cut()

        for _ in range(3):
            await asyncio.gather(*map(one, range(50)))
        await nothing_left(pod, redis)
        after = (await redis.info("clients"))["connected_clients"]
        assert after - before < 130  # the two command pools; one subscriber connection whatever happens
        assert len(worker.requests) <= 151


async def test_a_client_that_leaves_inside_its_body_leaves_nothing(redis_url: str, redis: Redis) -> None:
    async with ScriptedWorker(redis_url, words) as worker, running_pod(redis_url) as pod:
        _, writer = await asyncio.open_connection("127.0.0.1", pod.port)
        writer.write(_head(CHAT, b"x" * 100) + b'{"model":')
        await writer.drain()
        await eventually(lambda: pod.services.admission.active == 1)
        writer.transport.abort()
        await nothing_left(pod, redis)
        assert worker.requests == []
