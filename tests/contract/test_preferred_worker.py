"""A request whose prefix a worker has cached is offered to that one first, briefly, and never keeps others idle."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from shared import keys
from shared.claims import ClaimQueue
from shared.limits import Terms
from shared.messages import GenerateRequest
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker
from tests.support.records import make_request
from tests.support.wait import eventually


async def _offer(queue: RequestQueue, prefer: str, **changes: object) -> GenerateRequest:
    request = make_request(**changes)
    await queue.submit(request, max_waiting=1000, max_waiting_tokens=100_000, terms=Terms(prefer=prefer))
    return request


_FAR = 4_000_000_000_000
"""A moment that no test reaches, however slow it is."""


async def _has_room(redis: Redis, worker: ClaimQueue, room: int = 4) -> None:
    """The worker looked just now, found nothing and has room."""
    assert await worker.read(room, 1) == []
    await redis.hset(keys.seat_key(0, "tiny", "there"), "at", _FAR)


async def _keep_offered(redis: Redis, request: GenerateRequest) -> None:
    await redis.hset(keys.request_key(request.rid), "offer", _FAR)


async def test_it_is_kept_for_a_worker_with_room(queue: RequestQueue, make_worker: MakeWorker, redis: Redis) -> None:
    here, there = await make_worker("here"), await make_worker("there")
    await _has_room(redis, there)
    request = await _offer(queue, "there")
    await _keep_offered(redis, request)
    other = await _offer(queue, "")

    assert [entry.rid for entry in await here.read(4, 1)] == [other.rid]
    assert [entry.rid for entry in await there.read(4, 1)] == [request.rid]


async def test_a_full_or_unknown_worker_keeps_nobody_waiting(queue: RequestQueue, make_worker: MakeWorker) -> None:
    here, there = await make_worker("here"), await make_worker("there")
    await _offer(queue, "")
    assert len(await there.read(1, 1)) == 1  # full now
    full, gone = await _offer(queue, "there"), await _offer(queue, "left-long-ago")

    assert [entry.rid for entry in await here.read(4, 1)] == [full.rid, gone.rid]


async def test_a_worker_that_does_not_come_loses_the_offer(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    """The other one sleeps exactly as long as the offer stands, without being rung again."""
    here, there = await make_worker("here"), await make_worker("there")
    await _has_room(redis, there)
    request = await _offer(queue, "there")
    taken: list[str] = []

    async def look() -> bool:
        taken.extend(entry.rid for entry in await here.read(4, 60_000))
        return bool(taken)

    await eventually(look, timeout=5)
    assert taken == [request.rid]


async def test_the_preferred_worker_is_woken_among_many(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    readings = {name: asyncio.create_task((await make_worker(name)).read(4, 60_000)) for name in "abcd"}

    async def asleep() -> bool:
        return int((await redis.info("clients"))["blocked_clients"]) == 4

    await eventually(asleep)
    request = await _offer(queue, "d")

    async with asyncio.timeout(5):
        entries = await readings["d"]
    assert [entry.rid for entry in entries] == [request.rid]
    for reading in readings.values():
        reading.cancel()
    await asyncio.gather(*readings.values(), return_exceptions=True)


async def test_in_a_backlog_each_worker_picks_its_own_but_nobody_is_overtaken_for_ever(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    here, there = await make_worker("here"), await make_worker("there")
    await _has_room(redis, there)
    theirs = await _offer(queue, "there")
    await redis.hset(keys.request_key(theirs.rid), "offer", 1)  # long ago
    mine = [await _offer(queue, "here") for _ in range(12)]
    order = []
    for _ in range(10):
        order += [entry.rid for entry in await here.read(1, 1)]
    assert order[:8] == [one.rid for one in mine[:8]]
    assert order[8] == theirs.rid
