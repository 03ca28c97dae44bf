"""A client that never gives up on a stream: it follows one generation over any number of pods and connections.

It knows nothing of Headrace's code, only its public rules: an SSE event carries `id: <rid>:<seq>`, a GET of
/v1/streams/{rid} with Last-Event-ID gives the rest, the same Idempotency-Key attaches to the running request.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["Outcome", "events", "follow", "parse_block"]

RETRY_PAUSE_S = 0.1
TRANSIENT = {429, 502, 503}
RESUMABLE = "resume"


@dataclass
class Outcome:
    """What one client saw, over all its connections."""

    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    rid: str = ""
    last_id: str = ""
    ids: list[str] = field(default_factory=list)
    public_ids: set[str] = field(default_factory=set)
    arrivals: list[float] = field(default_factory=list)
    """Monotonic seconds of every event."""
    spoke_at: float = math.inf
    """Of the first one with text: before that it may have waited in the queue."""
    reconnects: int = 0
    comments: int = 0

    @property
    def longest_gap(self) -> float:
        """Seconds between two events at most."""
        return max((b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0)

    def take(self, event: dict[str, str]) -> None:
        """One SSE event as `events` gives it."""
        if event.get("id"):
            self.last_id = event["id"]
            self.rid = event["id"].rsplit(":", 1)[0]
            self.ids.append(event["id"])
        data = event["data"]
        self.arrivals.append(time.monotonic())
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.public_ids.add(chunk["id"])
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            index = choice["index"]
            assert index not in self.finish or not text, "text after the finish reason"
            self.texts[index] = self.texts.get(index, "") + (text or "")
            if text:
                self.spoke_at = min(self.spoke_at, self.arrivals[-1])
            if choice["finish_reason"]:
                assert index not in self.finish, "two finish reasons for one choice"
                self.finish[index] = choice["finish_reason"]


def parse_block(block: bytes) -> tuple[dict[str, str], int]:
    """The bytes between two LF LF -> fields by name, number of comment lines."""
    event: dict[str, str] = {}
    lines = block.decode().split("\n")
    for line in lines:
        if not line.startswith(":"):
            name, _, value = line.partition(":")
            event[name] = event.get(name, "") + value.removeprefix(" ")
    return event, sum(line.startswith(":") for line in lines)


async def events(
    response: httpx.Response, on_comment: Callable[[], None] = lambda: None
) -> AsyncIterator[dict[str, str]]:
    """SSE events of a response, split on LF LF only, as the raw bytes came."""
    buffer = b""
    async for part in response.aiter_raw():
        buffer += part
        while b"\n\n" in buffer:
            block, buffer = buffer.split(b"\n\n", 1)
            event, comments = parse_block(block)
            for _ in range(comments):
                on_comment()
            if "data" in event:
                yield event


async def follow(
    pods: Callable[[], Sequence[str]],
    path: str,
    body: dict[str, Any],
    *,
    deadline_s: float = 120.0,
    headers: dict[str, str] | None = None,
    seed: int = 0,
    outcome: Outcome | None = None,
) -> Outcome:
    """POST `body` (made a stream with usage) to one of `pods()` and follow it to its end wherever it goes.

    A connection that breaks, or ends without [DONE] or with a resumable error, is followed by another one to another
    pod. `outcome` is filled and returned, for a test that looks on. Raises TimeoutError when there is no end within
    `deadline_s`.
    """
    outcome = outcome or Outcome()
    rng = random.Random(seed)
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    post_headers = {"Idempotency-Key": uuid.uuid4().hex, "X-Headrace-Keep-Running": "30", **(headers or {})}
    timeout = httpx.Timeout(10.0, read=60.0)
    async with asyncio.timeout(deadline_s), httpx.AsyncClient(timeout=timeout, trust_env=False, verify=False) as client:
        while True:
            base = rng.choice(list(pods()))
            if outcome.last_id:
                resume_headers = {"Last-Event-ID": outcome.last_id, **(headers or {})}
                call = client.stream("GET", f"{base}/v1/streams/{outcome.rid}", headers=resume_headers)
            else:
                call = client.stream("POST", base + path, json=body, headers=post_headers)
            with suppress(httpx.TransportError):  # the pod died: that is what this client is for
                await _read(call, outcome)
            if outcome.done or (outcome.error and outcome.error.get("code") != RESUMABLE):
                return outcome
            outcome.error = None
            outcome.reconnects += 1
            await asyncio.sleep(RETRY_PAUSE_S)


async def _read(call: Any, outcome: Outcome) -> None:
    def comment() -> None:
        outcome.comments += 1

    async with call as response:
        if response.status_code == 200:
            async for event in events(response, comment):
                outcome.take(event)
            return
        text = (await response.aread()).decode()
        if response.status_code not in TRANSIENT:
            outcome.error = {"status": response.status_code, **json.loads(text)["error"]}
