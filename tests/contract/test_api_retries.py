"""Retries attach instead of generating again; back-pressure and deadlines are honest."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis

from shared.messages import Delta, End, GenerateRequest
from shared.queue import RequestQueue
from tests.support.api_pod import RawStream, chat_body, chunks_of, running_pod, texts_of
from tests.support.scripted_worker import ScriptedWorker, say_each
from tests.support.wait import eventually

CHAT = "/v1/chat/completions"
KEY = {"Idempotency-Key": "order-66"}
FIRST, AGAIN = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}


def words(request: GenerateRequest) -> list[list[Delta]]:
    return say_each(["One two three"] * request.num_choices)


async def test_the_same_key_is_answered_once_by_any_pod(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, words) as worker,
        running_pod(redis_url) as pod,
        running_pod(redis_url) as other,
    ):
        whole = (await pod.post(CHAT, chat_body(), **KEY)).json()
        assert (await other.post(CHAT, chat_body(), **KEY)).json() == whole
        streamed = chunks_of(await other.stream(CHAT, chat_body(stream=True), **KEY))
        assert streamed[0]["id"] == whole["id"]
        assert texts_of(streamed) == {0: "One two three"}
        assert len(worker.requests) == 1
        other_body = await other.post(CHAT, chat_body("Something else"), **KEY)
        assert (other_body.status_code, other_body.json()["error"]["param"]) == (400, "Idempotency-Key")
        assert (await other.post(CHAT, chat_body(), **{"Idempotency-Key": "another"})).json()["id"] != whole["id"]


async def test_a_running_request_is_attached_to_and_outlives_its_first_client(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, words, gated=True) as worker,
        running_pod(redis_url) as pod,
        running_pod(redis_url) as other,
    ):
        worker.allow(1)
        first = RawStream(pod, CHAT, chat_body(stream=True), **KEY)
        await first.__aenter__()
        events = aiter(first)
        seen = [await anext(events) for _ in range(2)]
        async with RawStream(other, CHAT, chat_body(stream=True), **KEY) as second:
            attached = aiter(second)
            assert [await anext(attached) for _ in range(2)] == seen
            await first.cut()
            await eventually(lambda: pod.services.relay._streams == set(), what="the first pod let go")
            worker.allow_all()
            rest = [event async for event in attached]
        assert rest[-1]["data"] == "[DONE]"
        assert worker.cancelled == []
        assert len(worker.requests) == 1


async def test_a_cancelled_or_failed_request_is_generated_anew(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, words, gated=True) as worker, running_pod(redis_url) as pod:
        async with RawStream(pod, CHAT, chat_body(stream=True), **KEY) as stream:
            events = aiter(stream)
            await anext(events)
        await eventually(lambda: len(worker.cancelled) == 1)
        worker.allow_all()
        assert (await pod.post(CHAT, chat_body(), **KEY)).status_code == 200
        assert len(worker.requests) == 2
    async with ScriptedWorker(redis_url, words, consumer="broken", end=End("engine_failure", "no")) as broken:
        failing = {"Idempotency-Key": "fails"}
        assert (await_two := [await post_once(redis_url, failing), await post_once(redis_url, failing)]) == [500, 500]
        assert len(await_two) == len(broken.requests)


async def post_once(redis_url: str, headers: dict[str, str]) -> int:
    async with running_pod(redis_url) as pod:
        return (await pod.post(CHAT, chat_body(), **headers)).status_code


async def test_sdk_retries_find_the_first_attempt_but_equal_calls_do_not(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, words) as worker, running_pod(redis_url) as pod:
        first, equal = (await asyncio.gather(*(pod.post(CHAT, chat_body(), **FIRST) for _ in range(2)))), 2
        assert len({answer.json()["id"] for answer in first}) == equal == len(worker.requests)
        again = await pod.post(CHAT, chat_body(), **AGAIN)
        assert again.json()["id"] in {answer.json()["id"] for answer in first}
        assert len(worker.requests) == equal
        fresh = await pod.post(CHAT, chat_body("Other"), **AGAIN)
        assert fresh.status_code == 200
        assert len(worker.requests) == equal + 1


async def test_a_full_queue_is_a_429_that_says_when(redis_url: str, redis: Redis) -> None:
    async with running_pod(redis_url, max_queue_requests=2, wait=False) as pod:
        async with ScriptedWorker(redis_url, words):
            await pod.ready()
        waiting = [RawStream(pod, CHAT, chat_body(stream=True)) for _ in range(2)]
        for stream in waiting:
            await stream.__aenter__()
        for _ in range(3):
            response = await pod.chat()
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert 1 <= int(response.headers["retry-after"]) <= 60
        assert (await RequestQueue(redis).depth("tiny")).waiting == 2
        async with ScriptedWorker(redis_url, words, consumer="late"):
            for stream in waiting:
                assert [event async for event in stream][-1]["data"] == "[DONE]"
                await stream.cut()
        assert pod.services.admission.active == 0


async def test_a_passed_deadline_drops_a_request_before_it_starts(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False) as pod:
        async with ScriptedWorker(redis_url, words):
            await pod.ready()
        late: list[Any] = [
            asyncio.create_task(pod.post(CHAT, chat_body(), **{"X-Request-Timeout": "0.2"})),
            asyncio.create_task(pod.chat(deadline_ms=200)),
        ]
        for response in await asyncio.gather(*late):  # no worker at all: the pod ends them
            assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
            assert response.headers["x-should-retry"] == "false"
        bad = await pod.post(CHAT, chat_body(), **{"X-Request-Timeout": "-1"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "X-Request-Timeout")
        async with ScriptedWorker(redis_url, words, consumer="late") as worker:
            assert (await pod.post(CHAT, chat_body(), **{"X-Request-Timeout": "30"})).status_code == 200
            assert len(worker.requests) == 1


async def test_requests_without_a_seed_get_the_pods_or_one_of_their_own(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, words) as worker:
        async with running_pod(redis_url, seed=7) as pod:
            await pod.chat()
            await pod.chat(seed=8)
        async with running_pod(redis_url) as pod:
            await pod.chat()
            await pod.chat()
    seeds = [request.sampling.seed for request in worker.requests]
    assert seeds[:2] == [7, 8]
    assert len(set(seeds)) == 4
