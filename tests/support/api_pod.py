"""A real pod in the test's event loop: the app behind its own uvicorn server on a free port; and a raw HTTP client.

In: settings by name. Out: a base URL, the pod's services, events split on LF LF only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from api_service.server import PodServer
from api_service.services import Services
from api_service.settings import Settings
from tests.support.stream_client import parse_block
from tests.support.wait import eventually

__all__ = ["ApiPod", "RawStream", "running_pod"]


@dataclass
class ApiPod:
    url: str
    port: int
    server: PodServer
    services: Services
    client: httpx.AsyncClient
    task: asyncio.Task[None]

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", chat_body(text, **fields))

    async def stream(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> list[dict[str, str]]:
        """All events of a stream: POST with a body, GET without."""
        async with RawStream(self, path, body, **headers) as stream:
            return [event async for event in stream]

    async def ready(self) -> None:
        async def is_ready() -> bool:
            return (await self.client.get("/ready")).status_code == 200

        await eventually(is_ready, what="the pod is ready")


def chat_body(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


@asynccontextmanager
async def running_pod(redis_url: str, *, wait: bool = True, **settings: Any) -> AsyncIterator[ApiPod]:
    """`wait`: until a worker is ready. The server must stop by itself within its own limits."""
    fields = {"redis_url": redis_url, "port": 0, "keepalive_s": 15.0, **settings}
    server = PodServer(Settings(**fields))
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started, what="uvicorn started")
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as client:
        pod = ApiPod(url, port, server, server._services, client, task)
        try:
            if wait:
                await pod.ready()
            yield pod
        finally:
            server.end()
            await asyncio.wait_for(task, 15)


class RawStream:
    """One streaming request on a socket of its own: raw bytes in `raw`, events by iteration; `cut()` drops it."""

    def __init__(self, pod: ApiPod, path: str, body: dict[str, Any] | None = None, **headers: str) -> None:
        self._pod = pod
        self._client = httpx.AsyncClient(base_url=pod.url, timeout=30, trust_env=False, verify=False)
        method = "GET" if body is None else "POST"
        self._request = self._client.build_request(method, path, json=body, headers=headers)
        self.raw = b""
        self.comments = 0
        self.response: httpx.Response

    async def __aenter__(self) -> RawStream:
        self.response = await self._client.send(self._request, stream=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def cut(self) -> None:
        await self.response.aclose()
        await self._client.aclose()

    async def __aiter__(self) -> AsyncIterator[dict[str, str]]:
        buffer = b""
        async for part in self.response.aiter_raw():
            self.raw += part
            buffer += part
            while b"\n\n" in buffer:
                block, buffer = buffer.split(b"\n\n", 1)
                event, comments = parse_block(block)
                self.comments += comments
                if event:
                    yield event


def chunks_of(events: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The JSON of all events but [DONE]."""
    return [json.loads(event["data"]) for event in events if event["data"] != "[DONE]"]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Joined text by choice, chat or completion."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            part = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (part or "")
    return texts
