"""Two pods and two workers that reach one Redis through a proxy each, and the streams that run while it misbehaves.

In: expected answers. Out: blocks in which their streams are under way, and what must be true of each afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import redis

from shared.keys import request_key
from tests.support.chaos_checks import Books, assert_exact, connected, queued, read_log
from tests.support.chaos_load import Expected, follow_all
from tests.support.chaos_proxy import ChaosProxy
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack
from tests.support.stream_client import Outcome
from tests.support.wait import eventually

__all__ = ["Scene", "accepted", "flush_all", "refused", "stored_records", "streaming"]


@dataclass
class Scene:
    server: RedisServer
    stack: Stack
    pod_side: ChaosProxy
    worker_side: ChaosProxy

    @property
    def urls(self) -> list[str]:
        return [pod.url for pod in self.stack.pods]

    def run(self, act: Callable[[redis.Redis], object]) -> None:
        """One command, straight to Redis."""
        with connected(self.server) as client:
            act(client)

    def settled(self) -> list[bool]:
        """Whether each worker serves and has every block free, each pod serves, and nothing waits."""
        cards = [worker.card() for worker in self.stack.workers]
        free = [card is not None and card.state == "ready" and card.kv_blocks_used == 0 for card in cards]
        return [*free, *(pod.is_ready() for pod in self.stack.pods), queued(self.server) == 0]


@asynccontextmanager
async def streaming(scene: Scene, expected: list[Expected], *, others: int = 0) -> AsyncIterator[list[Outcome]]:
    """All streams are under way in the block, some in the queue; at its end each is exact, on its one connection.
    `others`: requests at most that the block itself sends."""
    books, outcomes = Books.open(scene.server), [Outcome() for _ in expected]
    running = asyncio.create_task(follow_all(scene.urls, expected, outcomes=outcomes))
    try:
        await eventually(lambda: sum(len(o.arrivals) > 4 for o in outcomes) >= 5, 30, what="five streams speak")
        await eventually(lambda: all(o.rid or o.arrivals for o in outcomes) or queued(scene.server) >= 8, 10)
        yield outcomes
        done = await running
    finally:
        running.cancel()
    assert_exact(expected, done)
    assert [o.reconnects for o in outcomes] == [0] * len(outcomes), "a pod ended a stream that could go on"
    await books.settle(outcomes, others=others)


async def refused(url: str) -> float:
    """A new request hears 503 and when to come again; the seconds that took."""
    began = time.monotonic()
    body = {"model": "tiny", "prompt": "new", "max_tokens": 1}
    async with httpx.AsyncClient(timeout=20, trust_env=False, verify=False) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 503, answer.text
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.json()["error"]["code"] in ("redis_unavailable", "overloaded")
    return time.monotonic() - began


async def accepted(scene: Scene, within_s: float) -> None:
    """A new request is answered by each pod."""
    body = {"model": "tiny", "prompt": "new", "max_tokens": 1}
    async with httpx.AsyncClient(timeout=within_s, trust_env=False, verify=False) as client:
        for url in scene.urls:
            answer = await client.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text


def flush_all(server: RedisServer, rids: list[str]) -> set[str]:
    """Deletes everything; those of the requests that had ended by then."""
    rids = [rid for rid in rids if rid]
    with connected(server) as client, client.pipeline(transaction=True) as together:
        for rid in rids:
            together.hget(request_key(rid), "state")
        together.flushall()
        *states, _ = together.execute()
    return {rid for rid, state in zip(rids, states, strict=True) if state == b"done"}


def stored_records(scene: Scene, outcomes: list[Outcome]) -> dict[str, int]:
    """By request, of those that clients have text of."""
    return {
        outcome.rid: len(read_log(scene.server, outcome.rid)) for outcome in outcomes if any(outcome.texts.values())
    }
