"""Requests that another worker took over: what the first one still computes reaches no log and holds no room."""

from __future__ import annotations

import threading

from redis.asyncio import Redis

from engine_worker.engine import Engine
from engine_worker.models.base import LoadedModel
from engine_worker.request import TokenEvent
from shared import keys
from shared.claims import Acquired, ClaimQueue
from shared.queue import RequestQueue
from tests.support.records import again, make_request
from tests.support.wait import eventually
from tests.support.workers import ask, finished, other_worker, read_answer, running_worker, submit

BLOCK, BLOCKS = 16, 32
POOL = BLOCK * BLOCKS
BYTES_A_TOKEN = 2 * 2 * 2 * 8 * 4
"""Keys and values of two layers with two heads of eight float32 each."""
LEASE_MS = 600_000
"""Nothing is lost by silence here: what is taken over is taken from an owner that writes and renews."""


async def take_over(redis: Redis, rival: ClaimQueue, count: int) -> list[Acquired]:
    """As if the owner had been silent for two leases; all of it at once."""
    queue = keys.queue_key(0, "tiny", "interactive")
    pending = await redis.xpending_range(queue, keys.GROUP, "-", "+", 100)
    for item in pending:
        entry = [item["message_id"]]
        await redis.xclaim(queue, keys.GROUP, item["consumer"], 0, entry, idle=2 * LEASE_MS, justid=True)
    acquired = await rival.acquire(await rival.reclaim(count))
    assert len(acquired) == count
    return acquired


class Pause:
    """Holds the engine before its next step once the pool is full."""

    def __init__(self) -> None:
        self.full, self.go_on = threading.Event(), threading.Event()

    def __call__(self, engine: Engine) -> None:
        step = engine.step

        def held() -> list[TokenEvent]:
            if engine.stats().blocks_used == BLOCKS:
                self.full.set()
                assert self.go_on.wait(20)
            return step()

        engine.step = held  # type: ignore[method-assign]


async def test_kv_09_fenced_requests_write_nothing_and_leave_the_whole_pool_to_one(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    crowd = [make_request(prompts=(tuple(range(3 + i, 99 + i)),), max_tokens=32) for i in range(4)]
    whole = make_request(prompts=(tuple(3 + i % 300 for i in range(POOL - 20)),), max_tokens=20)
    async with running_worker(redis_url, tiny):
        expected = {one.rid: (await ask(redis, again(one))).tokens() for one in (*crowd, whole)}
    pause, settings = Pause(), {"kv_cache_memory": POOL * BYTES_A_TOKEN, "lease_ms": LEASE_MS}
    async with (
        running_worker(redis_url, tiny, prepare=pause, **settings) as first,
        other_worker(redis_url, lease_ms=LEASE_MS) as rival,
    ):
        pool = first.engine.stats
        assert pool().blocks_total == BLOCKS
        for one in crowd:
            await submit(redis, one)
        await eventually(pause.full.is_set, what="four requests hold the whole pool")

        acquired = await take_over(redis, rival, len(crowd))
        logs = {one.claim.rid: one.records for one in acquired}
        pause.go_on.set()

        await eventually(lambda: first.worker.outbox.counters["dropped_fenced"] == len(crowd))
        await eventually(lambda: pool().blocks_used == 0)
        assert pool().blocks_cached > 0, "what they held may still be found"
        assert (await ask(redis, whole)).tokens() == expected[whole.rid]
        assert {rid: (await read_answer(redis, rid)).payloads for rid in logs} == logs
        await rival.hand_back([one.claim for one in acquired])
        for one in crowd:
            answer = await finished(redis, one.rid)
            assert answer.tokens() == expected[one.rid]
            assert answer.payloads[: len(logs[one.rid])] == logs[one.rid]
            state = await RequestQueue(redis).state(one.rid)
            assert state is not None
            assert state.epoch == 3
