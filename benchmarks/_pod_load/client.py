"""Many streams at once from one process: python -m benchmarks._pod_load.client URL STREAMS TOKENS

In: a pod that a simulated worker (built-in vocabulary, seed 0) serves. Out, on standard output: "steady" when every
stream has begun, "ending" when the first one ends, then one line of JSON: what arrived, whether every token is the
right one in its place, and the gaps. Bytes are kept as they come and looked at afterwards: this process must not be
what is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop
from tokenizers import Tokenizer

from benchmarks._percentile import percentile
from engine_worker.simulate.tokens import TokenSource, ordinary_tokens
from engine_worker.simulate.vocabulary import NAME, built_in_text
from shared.text.detokenize import Detokenizer
from shared.text.token_bytes import TokenBytes

_LIMIT_S = 300.0
_FAULTS_SHOWN = 5
_STARTING = 64
"""Streams that may wait for their first token at once: a crowd that comes within a second is another test."""


class Oracle:
    """What a simulated worker says to request `number`, known without asking it."""

    def __init__(self) -> None:
        text = built_in_text()
        self._tokenizer = Tokenizer.from_buffer(text.tokenizer_json)
        self._token_bytes = TokenBytes.from_tokenizer_json(text.tokenizer_json)
        self._source = TokenSource(ordinary_tokens(self._token_bytes), seed=0)

    @staticmethod
    def body(number: int, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"This is stream {number}."}]
        return {"model": NAME, "messages": messages, "max_tokens": tokens, "seed": number, "stream": True}

    def answer(self, number: int, tokens: int) -> str:
        """The text of request `number` with that many tokens."""
        return Detokenizer(self._token_bytes).push(self._ids(number, tokens))

    def lengths(self, number: int, tokens: int) -> list[int]:
        """Characters of that text after each of its tokens."""
        pieces = (len(self._token_bytes.bytes_of(token).decode()) for token in self._ids(number, tokens))
        return list(itertools.accumulate(pieces))

    def _ids(self, number: int, tokens: int) -> list[int]:
        prompt = f"<|im_start|>user\nThis is stream {number}.<|im_end|>\n<|im_start|>assistant\n"
        key = self._source.key(self._tokenizer.encode(prompt).ids, number)
        return [self._source.token(key, position) for position in range(tokens)]


@dataclass
class Run:
    """What all streams share."""

    begun: int = 0
    streams: int = 0
    ended: int = 0
    steady_at: float = 0.0
    ending_at: float = 0.0
    may_start: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_STARTING))

    def one_begun(self) -> None:
        self.begun += 1
        self.may_start.release()
        if self.begun == self.streams:
            self.steady_at = time.monotonic()
            print("steady", flush=True)

    def one_ended(self) -> None:
        if not self.ended:
            self.ending_at = time.monotonic()
            print("ending", flush=True)
        self.ended += 1


@dataclass
class Stream(asyncio.Protocol):
    """One connection: sends a request, keeps what comes."""

    run: Run
    request: bytes
    done: asyncio.Future[None]
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    events: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.monotonic(), data))
        if self.events < 2:  # the opening event, then the first token
            self.events += data.count(b"id: ")
            if self.events >= 2:
                self.run.one_begun()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.events < 2:
            self.run.may_start.release()
        self.run.one_ended()
        if not self.done.done():
            self.done.set_result(None)


def unchunked(data: bytes) -> bytes:
    """The body of a chunked answer, or of its beginning."""
    body, rest = b"", data.partition(b"\r\n\r\n")[2]
    while b"\r\n" in rest:
        head, _, rest = rest.partition(b"\r\n")
        size = int(head, 16)
        body, rest = body + rest[:size], rest[size + 2 :]
    return body


def check(data: bytes, expected: str) -> str:
    """What is wrong with an answer, "" when nothing is."""
    if not data.startswith(b"HTTP/1.1 200"):
        return f"refused: {data[:200]!r}"
    blocks = unchunked(data).decode().split("\n\n")
    if blocks[-2:] != ["data: [DONE]", ""]:
        return f"no clean end: {blocks[-2:]!r}"
    chunks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks[:-2]]
    numbers = [int(chunk["id"].rsplit(":", 1)[1]) for chunk in chunks]
    if numbers != sorted(set(numbers)):
        return f"event numbers {numbers}"
    choices = [json.loads(chunk["data"])["choices"][0] for chunk in chunks]
    if [choice["finish_reason"] for choice in choices] != [None] * (len(choices) - 1) + ["length"]:
        return "not exactly one end"
    text = said(data)
    return "" if text == expected else f"text {text[-80:]!r}, expected {expected[-80:]!r}"


def said(data: bytes) -> str:
    """The text of an answer, or of its beginning."""
    events = (block.partition("data: ")[2] for block in unchunked(data).decode(errors="ignore").split("\n\n")[:-1])
    chunks = (json.loads(event) for event in events if event != "[DONE]")
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def drive(url: str, streams: int, tokens: int) -> dict[str, Any]:
    """All streams at once; the findings."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    loop, run = asyncio.get_running_loop(), Run(streams=streams)
    opened: list[Stream] = []
    started = time.monotonic()
    for number in range(streams):
        body = json.dumps(Oracle.body(number, tokens)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        request = f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        await run.may_start.acquire()
        stream = Stream(run, request, loop.create_future())
        opened.append(stream)
        await loop.create_connection(lambda stream=stream: stream, host, port)  # type: ignore[misc]
    async with asyncio.timeout(_LIMIT_S):
        await asyncio.gather(*(stream.done for stream in opened))
    ended = time.monotonic()
    return judge(opened, run, tokens) | {"seconds": ended - started}


def judge(opened: list[Stream], run: Run, tokens: int) -> dict[str, Any]:
    """Exactness of every stream; tokens and gaps of the time in which all of them ran."""
    oracle = Oracle()
    faults, gaps, steady = [], [], 0
    for number, stream in enumerate(opened):
        fault = check(b"".join(data for _, data in stream.parts), oracle.answer(number, tokens))
        faults += [f"stream {number}: {fault}"] if fault else []
        inside = [(at, data) for at, data in stream.parts if run.steady_at < at <= run.ending_at and b"id: " in data]
        lengths = oracle.lengths(number, tokens)
        before, after = (
            bisect_right(lengths, len(said(b"".join(data for at, data in stream.parts if at <= end))))
            for end in (run.steady_at, run.ending_at)
        )
        steady += after - before
        gaps += [later[0] - earlier[0] for earlier, later in itertools.pairwise(inside)]
    gaps.sort()
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        "exact": len(opened) - len(faults),
        "faults": faults[:_FAULTS_SHOWN],
        "steady_s": run.ending_at - run.steady_at,
        "steady_tokens": steady,
        "gaps_ms": {name: round(percentile(gaps, share) * 1000, 1) for name, share in shares.items()},
    }


def main() -> None:
    url, streams, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(drive(url, streams, tokens))), flush=True)


if __name__ == "__main__":
    main()
