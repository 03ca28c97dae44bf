"""A client that shuts down its sending side and listens on is answered; one that has left is not taken for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from tests.support.api_pod import ApiPod, chat_body, running_pod
from tests.support.scripted_worker import ScriptedWorker, say
from tests.support.wait import eventually

LIMIT_S = 10.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b": keep-alive\n\n"
Scene = Callable[[ScriptedWorker, ApiPod], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(redis_url: str, request: pytest.FixtureRequest) -> Callable[[Scene], None]:
    """Runs a scene with a worker that says nothing before it may, on each event loop that a pod may have."""

    async def with_pod(scene: Scene) -> None:
        scripted = ScriptedWorker(redis_url, lambda _: say("word " * 8), gated=True)
        async with scripted as worker, running_pod(redis_url) as pod:
            await scene(worker, pod)

    def run(scene: Scene) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(with_pod(scene))

    return run


def post(*, stream: bool = False, version: str = "1.1") -> bytes:
    body = json.dumps(chat_body(stream=stream)).encode()
    lines = [f"POST /v1/chat/completions HTTP/{version}", "host: x", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


@asynccontextmanager
async def half_closed(pod: ApiPod, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which this was sent, and nothing will follow."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
    try:
        writer.write(data)
        writer.write_eof()
        yield reader
    finally:
        writer.close()


async def until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    return await asyncio.wait_for(reader.readuntil(end), LIMIT_S)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All until the server ends the connection."""
    return await asyncio.wait_for(reader.read(), LIMIT_S)


def test_a_whole_answer_comes_to_who_listens(play: Callable[[Scene], None]) -> None:
    async def scene(worker: ScriptedWorker, pod: ApiPod) -> None:
        async with half_closed(pod, post()) as reader:
            for _ in range(3):
                assert await until(reader, b"\r\n\r\n") == CONTINUE
            worker.allow_all()
            head, _, body = (await rest(reader)).replace(CONTINUE, b"").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close" in head
        assert json.loads(body)["choices"][0]["message"]["content"] == "word " * 8
        assert worker.cancelled == []

    play(scene)


def test_a_stream_comes_to_who_listens(play: Callable[[Scene], None]) -> None:
    async def scene(worker: ScriptedWorker, pod: ApiPod) -> None:
        async with half_closed(pod, post(stream=True)) as reader:
            head = await until(reader, b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            for _ in range(3):
                await until(reader, b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT))
            worker.allow_all()
            events = (await rest(reader)).replace(b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT), b"")
        assert events.count(b'"content":') >= 8
        assert events.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert worker.cancelled == []

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_who_listens_and_then_leaves_is_noticed(play: Callable[[Scene], None], stream: bool) -> None:
    async def scene(worker: ScriptedWorker, pod: ApiPod) -> None:
        async with half_closed(pod, post(stream=stream)) as reader:
            await until(reader, COMMENT if stream else CONTINUE)
        await eventually(lambda: worker.cancelled == [worker.requests[0].rid], LIMIT_S, what="the worker stopped")
        await pod.services.admission.idle.wait()

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_not_taken_for_a_listener(play: Callable[[Scene], None], stream: bool) -> None:
    async def scene(worker: ScriptedWorker, pod: ApiPod) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
        writer.write(post(stream=stream))
        await eventually(lambda: worker.requests, what="the request runs")
        if stream:  # nothing unread, so that closing sends no reset by itself
            await until(reader, b'"role":"assistant"')
            await until(reader, b"\r\n")
        writer.close()
        await eventually(lambda: worker.cancelled == [worker.requests[0].rid], 2, what="the worker stopped")
        await pod.services.admission.idle.wait()

    play(scene)


@pytest.mark.parametrize("cut_off", [b"GET /hea", post()[:-5]], ids=["head", "body"])
def test_all_that_was_asked_is_answered_in_order(play: Callable[[Scene], None], cut_off: bytes) -> None:
    async def scene(worker: ScriptedWorker, pod: ApiPod) -> None:
        worker.allow_all()
        async with half_closed(pod, get("/health") + post() + get("/version") + cut_off) as reader:
            answers = (await rest(reader)).replace(CONTINUE, b"")
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == answers.count(b"HTTP/1.1") == 3
        assert answers.index(b"word word") < answers.index(b'"version"')
        assert len(worker.requests) == 1

    play(scene)


def test_half_a_request_gets_no_answer(play: Callable[[Scene], None]) -> None:
    async def scene(worker: ScriptedWorker, pod: ApiPod) -> None:
        for nothing in (b"", b"GET /hea", post()[:-5]):
            async with half_closed(pod, nothing) as reader:
                assert await rest(reader) == b""
        assert worker.requests == []

    play(scene)


def test_a_client_of_http_1_0_has_left(play: Callable[[Scene], None]) -> None:
    """Nothing may be sent to it before its answer, so nothing could tell."""

    async def scene(worker: ScriptedWorker, pod: ApiPod) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
        writer.write(post(version="1.0"))
        await eventually(lambda: worker.requests, what="the request runs")
        writer.write_eof()
        assert await rest(reader) == b""
        await eventually(lambda: worker.cancelled == [worker.requests[0].rid], 2, what="the worker stopped")
        writer.close()

    play(scene)
