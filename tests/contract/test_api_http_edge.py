"""The pod's outermost edge on raw sockets: half-sent, oversized, pipelined and malformed requests, crowds, HEAD."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared.keys import new_rid
from tests.support.api_pod import ApiPod, chat_body, running_pod
from tests.support.scripted_worker import ScriptedWorker, say
from tests.support.wait import eventually

KEPT_OPEN_S = 10.0
"""Far above every limit that these tests set."""


def post(body: dict[str, Any] | bytes, path: str = "/v1/chat/completions", *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


class Raw:
    """One connection; answers are read as they come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body of the next answer that has a content-length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), KEPT_OPEN_S)
        first, *lines = head.decode().strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        data = await self.reader.readexactly(int(headers["content-length"])) if body else b""
        return int(first.split()[1]), headers, data

    async def error(self) -> tuple[int, str]:
        """Status and code of an answer in OpenAI's form."""
        status, headers, data = await self.answer()
        assert headers["content-type"] == "application/json"
        assert headers["x-request-id"]
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return status, error["code"]

    async def ended(self) -> bytes:
        """What still came until the server ended the connection."""
        return await asyncio.wait_for(self.reader.read(), KEPT_OPEN_S)


@asynccontextmanager
async def connected(pod: ApiPod) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_pipelined_behind_another_does_not_hide_that_the_client_leaves(
    redis_url: str, streamed: bool
) -> None:
    async with ScriptedWorker(redis_url, lambda _: say("x" * 40), gated=True) as worker, running_pod(redis_url) as pod:
        async with connected(pod) as raw:
            await raw.send(post(chat_body(stream=streamed)))
            await eventually(lambda: worker.requests, what="the first request runs")
            await raw.send(post(chat_body("second")) + get("/health"))
            await eventually(lambda: pod.server.server_state.connections, what="the connection is known")
        await eventually(lambda: worker.cancelled == [worker.requests[0].rid], what="the request is cancelled")
        assert len(worker.requests) == 1  # what waited behind it never began


async def test_pipelined_requests_are_answered_in_order(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False) as pod, connected(pod) as raw:
        paths = ["/health", "/version", "/nowhere", "/ping", "/health"]
        await raw.send(b"".join(map(get, paths)))
        answers = [await raw.answer() for _ in paths]
        assert [status for status, _, _ in answers] == [200, 200, 404, 200, 200]
        assert "version" in json.loads(answers[1][2])


async def test_more_behind_a_request_than_is_kept_ends_the_connection_after_its_answer(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, lambda _: say("ok"), gated=True) as worker, running_pod(redis_url) as pod:
        async with connected(pod) as raw:
            await raw.send(post(chat_body()))
            await eventually(lambda: worker.requests, what="the first request runs")
            await raw.send(get("/version") + post(b" " * 200_000))
            worker.allow_all()
            status, _, data = await raw.answer()
            assert (status, json.loads(data)["choices"][0]["message"]["content"]) == (200, "ok")
            assert (await raw.answer())[0] == 200
            assert await raw.ended() == b""
        assert len(worker.requests) == 1


async def test_headers_are_bounded_in_bytes_and_number(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False, max_header_bytes=4096) as pod:
        within = get("/health", "x-long: " + "a" * 3000)
        too_long = get("/health", "x-long: " + "a" * 5000)
        unending = b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 10_000
        too_many = get("/health", *(f"x{i}: 1" for i in range(250)))
        long_target = get("/health?" + "a" * 5000)
        async with connected(pod) as raw:
            await raw.send(within)
            assert (await raw.answer())[0] == 200
        for request in (too_long, unending, too_many, long_target):
            async with connected(pod) as raw:
                await raw.send(request)
                assert await raw.error() == (431, "headers_too_large")
                assert await raw.ended() == b""
        async with connected(pod) as raw:  # piece by piece, to the limit and beyond
            await raw.send(b"GET /health HTTP/1.1\r\n")
            for i in range(200):
                await raw.send(f"x{i}: {'a' * 100}\r\n".encode())
            assert await raw.error() == (431, "headers_too_large")
        metrics = (await pod.client.get("/metrics")).text
        assert 'headrace_refusals_total{code="headers_too_large"} 5.0' in metrics


async def test_trailers_without_end_are_refused_too(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False, max_header_bytes=4096) as pod, connected(pod) as raw:
        head = get(
            "/v1/chat/completions", "content-type: application/json", "transfer-encoding: chunked", method="POST"
        )
        await raw.send(head + b"2\r\n{}\r\n0\r\n")
        for _ in range(100):
            await raw.send(b"x-more: " + b"a" * 100 + b"\r\n")
        assert await raw.error() == (431, "headers_too_large")


async def test_a_half_sent_head_or_body_is_answered_408_in_time(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False, header_timeout_s=0.3, body_timeout_s=0.3) as pod:
        for half in (b"GET /hea", b"GET /health HTTP/1.1\r\nhost: x\r\n", post(chat_body())[:-5]):
            async with connected(pod) as raw:
                await raw.send(half)
                assert await raw.error() == (408, "request_timeout")
                assert await raw.ended() == b""
        assert pod.services.admission.idle.is_set()  # the half-sent body holds no permit any more


async def test_a_head_that_drips_in_is_not_kept_alive_by_its_drops(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False, header_timeout_s=0.5) as pod, connected(pod) as raw:
        await raw.send(b"GET /health HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                await raw.send(b"x: y\r\n")
                await asyncio.sleep(0.02)

        drops = asyncio.create_task(drip())
        try:
            assert await raw.error() == (408, "request_timeout")
        finally:
            drops.cancel()


async def test_a_slow_request_is_served_within_its_time(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False) as pod, connected(pod) as raw:
        for byte in get("/health"):
            await raw.send(bytes([byte]))
        assert (await raw.answer())[0] == 200
        whole = post(b"{}")
        for part in (whole[:30], whole[30:-1], whole[-1:]):
            await raw.send(part)
        assert (await raw.answer())[0] == 400


@pytest.mark.parametrize("said", [b"", b"\r\n"])
async def test_a_connection_that_says_nothing_ends(redis_url: str, said: bytes) -> None:
    async with running_pod(redis_url, wait=False, timeout_keep_alive=1) as pod, connected(pod) as raw:
        await raw.send(said)
        assert await raw.ended() == b""


@pytest.mark.parametrize(
    "nonsense",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        "GET /h\u00e4lth HTTP/1.1\r\n\r\n".encode(),
    ],
)
async def test_what_is_not_http_is_a_400_in_openais_form(redis_url: str, nonsense: bytes) -> None:
    async with running_pod(redis_url, wait=False) as pod, connected(pod) as raw:
        await raw.send(nonsense)
        assert await raw.error() == (400, "invalid_value")
        assert await raw.ended() == b""


async def test_nonsense_behind_a_running_request_does_not_get_into_its_answer(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, lambda _: say("fine"), gated=True) as worker, running_pod(redis_url) as pod:
        async with connected(pod) as raw:
            await raw.send(post(chat_body(stream=True)))
            await eventually(lambda: worker.requests, what="the request runs")
            await raw.send(b"nonsense\r\n\r\n")
            worker.allow_all()
            data = await raw.ended()
        assert data.count(b"HTTP/1.1 ") == 1
        assert b"data: [DONE]" in data
        assert not worker.cancelled


async def test_an_upgrade_to_http_2_is_left_alone(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False) as pod, connected(pod) as raw:
        await raw.send(post(b"[]", "/v1/chat/completions", "connection: Upgrade, HTTP2-Settings", "upgrade: h2c"))
        status, _, data = await raw.answer()
        assert (status, json.loads(data)["error"]["message"]) == (400, "The body must be a JSON object.")
        asking = get("/health", "connection: Upgrade", "upgrade: websocket")
        await raw.send(asking + get("/version") + asking * 3)
        assert [(await raw.answer())[0] for _ in range(5)] == [200] * 5
        await raw.send(get("x:1", method="CONNECT"))
        assert await raw.error() == (400, "invalid_value")


async def test_connections_beyond_the_limit_are_refused_but_probes_are_not(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False, max_connections=2) as pod, connected(pod) as one:
        await one.send(get("/health"))
        assert (await one.answer())[0] == 200
        async with connected(pod) as two:
            await two.send(get("/version"))
            assert (await two.answer())[0] == 200
            async with connected(pod) as three:
                await three.send(get("/health"))
                assert (await three.answer())[0] == 200
                await three.send(post(chat_body()))
                status, headers, data = await three.answer()
                assert (status, json.loads(data)["error"]["code"]) == (503, "overloaded")
                assert headers["retry-after"] == "1"
                assert await three.ended() == b""
        await eventually(lambda: len(pod.server.server_state.connections) < 2, what="the others are gone")
        async with connected(pod) as four:
            await four.send(get("/version"))
            assert (await four.answer())[0] == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/v1/models"])
async def test_probes_may_ask_with_head(redis_url: str, path: str) -> None:
    async with ScriptedWorker(redis_url, lambda _: say("x")), running_pod(redis_url) as pod, connected(pod) as raw:
        await raw.send(get(path, method="HEAD") + get("/ready", method="HEAD") + get("/health"))
        for _ in range(2):
            status, headers, _ = await raw.answer(body=False)
            assert status == 200
            assert int(headers["content-length"]) > 0
        assert json.loads((await raw.answer())[2]) == {"status": "ok"}  # no body came in between


async def test_head_needs_a_key_where_get_does_and_starts_no_stream(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False, api_key=("k",)) as pod:
        assert (await pod.client.head("/health")).status_code == 200
        assert (await pod.client.head("/v1/models")).status_code == 401
        key = {"authorization": "Bearer k"}
        assert (await pod.client.head(f"/v1/streams/{new_rid(0)}", headers=key)).status_code == 405
        assert (await pod.client.head("/v1/chat/completions", headers=key)).status_code == 405


@pytest.mark.parametrize("cursor", ["٣", "１", "+1", " 1", "1_0", "-2", "1" * 13, ""])
async def test_cursors_are_ascii_digits(redis_url: str, cursor: str) -> None:
    async with running_pod(redis_url, wait=False) as pod:
        answer = await pod.client.get(f"/v1/streams/{new_rid(0)}", params={"starting_after": cursor})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")


@pytest.mark.parametrize("event_id", [":3", "3", "x:3", "{rid}", "{rid}:", "{rid}:x", "{other}:3", "{rid}:3:4"])
async def test_an_event_id_must_be_one_of_this_stream(redis_url: str, event_id: str) -> None:
    rid = new_rid(0)
    async with running_pod(redis_url, wait=False) as pod:
        header = {"Last-Event-ID": event_id.format(rid=rid, other=new_rid(0))}
        answer = await pod.client.get(f"/v1/streams/{rid}", headers=header)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
