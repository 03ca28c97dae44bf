"""The client where the server's own cost is measured: a socket and a look at the clock for every read.

`Client` drives every server alike and parses each event when it comes, which takes a half of what pod, worker and Redis
need for the token. This one counts events as they come and parses the last ones once the answer has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

from benchmarks._serving.client import Answer, Client

__all__ = ["LightClient"]

_GOES_ON = b'"finish_reason":null'
_LAST_EVENTS = 4
"""The last token's, usage and [DONE] are among them."""


class _Reader(asyncio.Protocol):
    """One connection, which the server closes after the answer."""

    def __init__(self, request: bytes, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self.parts: list[bytes] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.parts.append(data)
        tokens = data.count(_GOES_ON)
        if tokens:
            self._answer.arrivals += [now] * tokens
            self._answer.begun.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class LightClient(Client):
    """For Headrace's own event format: each token's event in one piece with its finish reason."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def stream(self, prompt: list[int], tokens: int, answer: Answer | None = None) -> Answer:
        answer = answer or Answer(tokens, len(prompt))
        address = urlsplit(self._url)
        body = json.dumps(self._body(prompt, tokens)).encode()
        head = f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        reader = _Reader(request, answer)
        answer.sent = time.perf_counter()
        try:
            host, port = str(address.hostname), address.port or 80
            await asyncio.get_running_loop().create_connection(lambda: reader, host, port)
            await reader.ended
        except OSError as error:
            answer.error = f"{type(error).__name__}: {error}"
        self._conclude(answer, b"".join(reader.parts))
        return answer

    def _conclude(self, answer: Answer, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 200"):
            answer.error = answer.error or repr(data[:300])
        now = time.perf_counter()
        for event in data.split(b"\n\n")[-_LAST_EVENTS:]:
            said = event.partition(b"data: ")[2].partition(b"\n")[0]
            if said and _GOES_ON not in said:
                self._note(answer, said, now)
        if not answer.arrivals and not answer.error:
            answer.error = "no token came"
        answer.begun.set()
