"""A pod that is stopped: readiness goes, streams get their time, the rest hears how to go on; the process ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

from shared.messages import Delta, GenerateRequest
from tests.support.api_pod import RawStream, chat_body, chunks_of, running_pod, texts_of
from tests.support.ports import free_port
from tests.support.scripted_worker import ScriptedWorker, say_each
from tests.support.stack import Pod
from tests.support.wait import eventually

CHAT = "/v1/chat/completions"
WORDS = "One two three four five"


def words(request: GenerateRequest) -> list[list[Delta]]:
    return say_each([WORDS] * request.num_choices)


async def test_sh_03_streams_that_end_in_time_are_whole(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, words, gated=True) as worker,
        running_pod(redis_url, drain_timeout_s=20) as pod,
    ):
        async with RawStream(pod, CHAT, chat_body(stream=True)) as stream:
            events = aiter(stream)
            await anext(events)
            pod.server.stop()

            async def not_ready() -> bool:
                return (await pod.client.get("/ready")).status_code == 503

            await eventually(not_ready)
            assert (await pod.client.get("/health")).headers["connection"] == "close"
            worker.allow_all()
            assert [event async for event in events][-1]["data"] == "[DONE]"
        await asyncio.wait_for(asyncio.shield(pod.task), 5)


async def test_sh_03_others_are_told_to_resume_and_lose_nothing(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, words, gated=True) as worker,
        running_pod(redis_url, drain_timeout_s=0.2) as pod,
        running_pod(redis_url) as other,
    ):
        worker.allow(2)
        async with RawStream(pod, CHAT, chat_body(stream=True)) as stream:
            events = aiter(stream)
            seen = [await anext(events) for _ in range(3)]
            pod.server.stop()
            rest = [event async for event in events]
        error = json.loads(rest[-1]["data"])["error"]
        assert error["code"] == "resume"
        assert "id" not in rest[-1]
        rid = seen[0]["id"].split(":")[0]
        assert f"/v1/streams/{rid}" in error["message"]
        await asyncio.wait_for(asyncio.shield(pod.task), 5)
        worker.allow_all()
        resumed = await other.stream(f"/v1/streams/{rid}", **{"Last-Event-ID": seen[-1]["id"]})
        assert texts_of(chunks_of([*seen, *resumed])) == {0: WORDS}
        assert worker.cancelled == []


async def test_a_whole_answer_cut_by_a_drain_is_a_503_and_cancelled(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, words, gated=True) as worker,
        running_pod(redis_url, drain_timeout_s=0.2) as pod,
    ):
        answer = asyncio.create_task(pod.chat())
        await eventually(lambda: len(worker.requests) == 1)
        pod.server.stop()
        response = await answer
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "overloaded")
        assert "Send the request again" in error["message"]
        assert "/v1/streams" not in error["message"], "nobody knows its id, and it is cancelled"
        assert response.headers["connection"] == "close"
        assert response.headers["retry-after"] == "1"
        await eventually(lambda: len(worker.cancelled) == 1, what="nobody could have found it again")


async def test_a_whole_answer_with_a_key_goes_on_when_it_is_asked_for_again(redis_url: str) -> None:
    key = {"Idempotency-Key": "k1"}
    async with ScriptedWorker(redis_url, words, gated=True) as worker, running_pod(redis_url) as other:
        async with running_pod(redis_url, drain_timeout_s=0.2) as pod:
            answer = asyncio.create_task(pod.client.post(CHAT, json=chat_body(), headers=key))
            await eventually(lambda: len(worker.requests) == 1)
            pod.server.stop()
            error = (await answer).json()["error"]
            assert error["code"] == "resume"
            assert "same key" in error["message"]
        worker.allow_all()
        whole = await other.client.post(CHAT, json=chat_body(), headers=key)
        assert whole.json()["choices"][0]["message"]["content"] == WORDS
        assert (len(worker.requests), worker.cancelled) == (1, [])


async def test_sh_04_sigterm_ends_the_process_with_ten_open_streams(redis_url: str, tmp_path: object) -> None:
    port, began = free_port(), 0.0
    env = {**os.environ, "HEADRACE_REDIS_URL": redis_url, "HEADRACE_PORT": str(port), "HEADRACE_DRAIN_TIMEOUT_S": "0.5"}
    async with ScriptedWorker(redis_url, words, gated=True) as worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "api_service", env=env, stderr=asyncio.subprocess.PIPE
        )
        try:
            pod = Pod("pod", [], {}, tmp_path, port)  # type: ignore[arg-type]
            await eventually(pod.is_ready, 60, what="the pod is ready")
            streams = [RawStream(pod, CHAT, chat_body(stream=True)) for _ in range(10)]  # type: ignore[arg-type]
            iterators = []
            for stream in streams:
                await stream.__aenter__()
                iterators.append(aiter(stream))
                await anext(iterators[-1])
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            for events in iterators:
                last = [event async for event in events][-1]
                assert json.loads(last["data"])["error"]["code"] == "resume"
            _, stderr = await asyncio.wait_for(process.communicate(), 10)
            assert process.returncode == 0
            assert time.monotonic() - began < 5
            assert b"Traceback" not in stderr
            for stream in streams:
                await stream.cut()
            worker.allow_all()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
