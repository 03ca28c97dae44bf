"""A stream goes on from any pod: after every cut, live or finished, for its owner only."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from shared.keys import log_key, new_rid, request_key
from shared.messages import Delta, GenerateRequest
from tests.support.api_pod import RawStream, chat_body, chunks_of, running_pod, texts_of
from tests.support.scripted_worker import ScriptedWorker, say_each
from tests.support.wait import eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "One two three 日本."
BODIES = [
    (CHAT, chat_body(stream=True, n=2, stream_options={"include_usage": True})),
    (CHAT, chat_body(stream=True)),
    (TEXT, {"model": "tiny", "prompt": ["A", "B"], "echo": True, "stream": True}),
]


def words(request: GenerateRequest) -> list[list[Delta]]:
    return say_each([WORDS] * request.num_choices)


def rid_of(events: list[dict[str, str]]) -> str:
    return events[0]["id"].rsplit(":", 1)[0]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_rl_08_cut_anywhere_and_resumed_on_another_pod(redis_url: str, path: str, body: dict[str, Any]) -> None:
    async with ScriptedWorker(redis_url, words), running_pod(redis_url) as pod, running_pod(redis_url) as other:
        whole = await pod.stream(path, body)
        assert whole[-1] == {"data": "[DONE]"}
        rid = rid_of(whole)
        assert await other.stream(f"/v1/streams/{rid}") == whole
        for cut, event in enumerate(whole[:-1]):
            assert await other.stream(f"/v1/streams/{rid}", **{"Last-Event-ID": event["id"]}) == whole[cut + 1 :]
            cursor = event["id"].rsplit(":", 1)[1]
            assert await other.stream(f"/v1/streams/cmpl-{rid}?starting_after={cursor}") == whole[cut + 1 :]


async def test_a_live_stream_is_followed_from_the_cursor_on(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, words, gated=True) as worker,
        running_pod(redis_url) as pod,
        running_pod(redis_url) as other,
    ):
        worker.allow(2)
        async with RawStream(pod, CHAT, chat_body(stream=True)) as first:
            events = aiter(first)
            seen = [await anext(events) for _ in range(3)]
            async with RawStream(other, f"/v1/streams/{rid_of(seen)}", **{"Last-Event-ID": seen[1]["id"]}) as second:
                resumed = aiter(second)
                assert await anext(resumed) == seen[2]
                worker.allow_all()
                rest = [event async for event in resumed]
            assert rest == [event async for event in events]
            assert texts_of(chunks_of([*seen, *rest])) == {0: WORDS}


async def test_rl_24_a_resumed_client_keeps_the_request_alive(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, words, gated=True) as worker,
        running_pod(redis_url) as pod,
        running_pod(redis_url) as other,
    ):
        worker.allow(1)
        first = RawStream(pod, CHAT, chat_body(stream=True))
        await first.__aenter__()
        events = aiter(first)
        seen = [await anext(events)]
        async with RawStream(other, f"/v1/streams/{rid_of(seen)}") as second:
            resumed = aiter(second)
            assert await anext(resumed) == seen[0]
            await first.cut()
            await eventually(lambda: pod.services.relay._streams == set(), what="the first pod let go")
            worker.allow_all()
            assert [event async for event in resumed][-1]["data"] == "[DONE]"
        assert worker.cancelled == []


@pytest.mark.parametrize(
    ("stream_id", "headers", "status", "code"),
    [
        ("abc", {}, 404, "stream_not_found"),
        ("chatcmpl-xyz", {}, 404, "stream_not_found"),
        (new_rid(0), {}, 410, "stream_expired"),
        (f"chatcmpl-{new_rid(0)}", {}, 410, "stream_expired"),
        (f"{new_rid(0)}?starting_after=abc", {}, 400, "invalid_value"),
        (f"{new_rid(0)}?starting_after=-2", {}, 400, "invalid_value"),
        (new_rid(0), {"Last-Event-ID": f"{new_rid(0)}:1"}, 400, "invalid_value"),
    ],
)
async def test_what_cannot_be_resumed(
    redis_url: str, stream_id: str, headers: dict[str, str], status: int, code: str
) -> None:
    async with running_pod(redis_url, wait=False) as pod:
        response = await pod.client.get(f"/v1/streams/{stream_id}", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_a_cursor_ahead_is_refused_and_an_expired_stream_is_gone(redis_url: str, redis: Redis) -> None:
    async with ScriptedWorker(redis_url, words), running_pod(redis_url, retention_ms=1000) as pod:
        whole = await pod.stream(CHAT, chat_body(stream=True, stream_options={"include_usage": True}))
        rid, last = whole[-2]["id"].rsplit(":", 1)
        assert await pod.stream(f"/v1/streams/{rid}?starting_after={last}") == [{"data": "[DONE]"}]
        ahead = await pod.client.get(f"/v1/streams/{rid}?starting_after={int(last) + 1}")
        assert (ahead.status_code, ahead.json()["error"]["code"]) == (400, "cursor_ahead")
        assert ahead.json()["error"]["param"] == "starting_after"
        ahead = await pod.client.get(f"/v1/streams/{rid}", headers={"Last-Event-ID": f"{rid}:{int(last) + 1}"})
        assert (ahead.status_code, ahead.json()["error"]["param"]) == (400, "Last-Event-ID")
        await redis.delete(request_key(rid), log_key(rid))
        assert (await pod.client.get(f"/v1/streams/{rid}")).status_code == 410
        assert pod.services.admission.active == 0


async def test_another_tenant_finds_nothing(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, words), running_pod(redis_url, api_key="one,two") as pod:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        whole = await pod.stream(CHAT, chat_body(stream=True), **one)
        path = f"/v1/streams/{rid_of(whole)}"
        assert await pod.stream(path, **one) == whole
        assert (await pod.client.get(path, headers=two)).status_code == 404
        assert (await pod.client.get(path)).status_code == 401
