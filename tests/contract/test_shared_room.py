"""Requests that come at once are shared by the workers with empty seats; a lone one, and one whose others do not come,
has all of them."""

from __future__ import annotations

import asyncio
import itertools
import time

from redis.asyncio import Redis

from shared import keys
from shared.claims import ClaimQueue, Entry
from shared.limits import Terms
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker, finish, submit
from tests.support.records import make_request
from tests.support.wait import eventually

_FAR = 4_000_000_000_000
"""A moment in Redis's time that no test reaches."""
_far = itertools.count(_FAR)


async def _submit_young(
    queue: RequestQueue, redis: Redis, count: int, klass: str = "interactive", n: int = 1
) -> list[str]:
    """Requests that stay young however slow the machine is: their entries are named after the far future."""
    name = keys.queue_key(0, "tiny", klass)
    last = await redis.xadd(name, {"rid": "none"}, id=f"{next(_far)}-0")
    await redis.xdel(name, last)  # the stream's next ids follow its last one
    return [(await submit(queue, klass=klass, n=n)).rid for _ in range(count)]


async def _see_room(redis: Redis, **rooms: int) -> None:
    """Workers that looked just now and had so many empty seats."""
    for name, seats in rooms.items():
        await redis.hset(keys.room_key(0, "tiny"), name, f"{seats} {_FAR}")
    await redis.pexpire(keys.room_key(0, "tiny"), keys.SEAT_TTL_MS)


async def _read_until(worker: ClaimQueue, name: str, room: int, split: dict[str, int], total: int) -> None:
    """What a worker process does: takes as long as it has room, and sleeps in between."""
    while sum(split.values()) < total and split[name] < room:
        entries = await worker.read(room - split[name], 200)
        split[name] += len(entries)
        await worker.acquire(entries)


async def test_sixteen_at_once_are_shared_by_two_idle_workers(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    workers = {name: await make_worker(name) for name in ("a", "b")}
    for worker in workers.values():
        assert await worker.read(16, 0) == []  # both have looked, and have room for 16
    split = dict.fromkeys(workers, 0)
    readings = [asyncio.create_task(_read_until(worker, name, 16, split, 16)) for name, worker in workers.items()]

    async def asleep() -> bool:
        return int((await redis.info("clients"))["blocked_clients"]) == 2

    await eventually(asleep)
    await asyncio.gather(*(submit(queue) for _ in range(16)))
    await asyncio.gather(*readings)
    assert sum(split.values()) == 16
    assert min(split.values()) >= 6


async def test_what_waits_is_split_so_that_all_keep_about_as_many_seats(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker("here")
    await _submit_young(queue, redis, 12)
    await _see_room(redis, busy=2, idle=10)
    # 16, 10 and 2 empty seats, 12 requests: the first has 6 before the second gets any, then they take turns; and an
    # eighth of 12 more, for it is here already.
    assert len(await worker.read(16, 0)) == 11
    assert await worker.read(5, 0) == []
    assert await redis.lrange(keys.own_bell_key(0, "tiny", "idle"), 0, -1) == [b"1"], "the one with most room is woken"
    assert await redis.exists(keys.own_bell_key(0, "tiny", "busy")) == 0


async def test_batch_requests_are_shared_as_well(queue: RequestQueue, make_worker: MakeWorker, redis: Redis) -> None:
    worker = await make_worker("here")
    await _submit_young(queue, redis, 8, "batch")
    await _see_room(redis, idle=16)
    assert len(await worker.read(16, 0)) == 5


async def test_a_worker_that_would_have_to_displace_batch_work_leaves_them_to_empty_seats(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker("here")
    await _submit_young(queue, redis, 8)
    await _see_room(redis, idle=8)
    assert await worker.read(16, 0, batch=0) == []
    await _submit_young(queue, redis, 1)
    assert len(await worker.read(16, 0, batch=0)) == 1, "what does not fit into those"


async def test_seats_that_became_empty_count_although_their_worker_has_not_looked_again(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    here, there = await make_worker("here"), await make_worker("there")
    for _ in range(6):
        await submit(queue)
    acquired = await there.acquire(await there.read(6, 0))
    assert len(acquired) == 6
    assert await here.read(6, 0) == []
    await redis.hset(keys.room_key(0, "tiny"), mapping={"there": f"6 {_FAR}", "here": f"6 {_FAR}"})
    assert len(await _taken_of(queue, redis, here, 2)) == 2, "there it is full"
    for one in acquired:
        await finish(there, one, 0)
    assert len(await _taken_of(queue, redis, here, 2, room=3)) == 0, "there are 6 again"


async def _taken_of(queue: RequestQueue, redis: Redis, worker: ClaimQueue, count: int, room: int = 6) -> list[Entry]:
    await _submit_young(queue, redis, count)
    return await worker.read(room, 0)


async def test_in_a_backlog_everybody_fills_up(queue: RequestQueue, make_worker: MakeWorker, redis: Redis) -> None:
    worker = await make_worker("here")
    await _submit_young(queue, redis, 20)
    await _see_room(redis, other=4)
    assert len(await worker.read(16, 0)) == 16


async def test_alone_it_takes_all(queue: RequestQueue, make_worker: MakeWorker, redis: Redis) -> None:
    worker = await make_worker("here")
    await _submit_young(queue, redis, 8)
    assert await worker.read(16, 0, batch=0) != [], "also in the place of batch work"
    assert len(await worker.read(16, 0)) == 0
    await _see_room(redis, full=0)
    rids = await _submit_young(queue, redis, 8)
    assert [entry.rid for entry in await worker.read(16, 0)] == rids


async def test_nothing_is_left_to_workers_that_are_full_however_many_choices_it_has(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker("here")
    await _submit_young(queue, redis, 3, n=3)
    await _see_room(redis, full=0)
    assert len(await worker.read(9, 0)) == 3


async def test_a_worker_that_was_not_seen_for_seconds_does_not_count(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker("here")
    now = int(time.time() * 1000)
    await redis.hset(keys.room_key(0, "tiny"), mapping={"gone": f"16 {now - 10_000}", "forgotten": "16 1"})
    await _submit_young(queue, redis, 8)
    assert len(await worker.read(16, 0)) == 8
    assert set(await redis.hkeys(keys.room_key(0, "tiny"))) == {b"gone", b"here"}, "and is forgotten in the end"


async def test_what_the_others_do_not_come_for_is_taken_after_a_moment(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    """Without being woken: it sleeps exactly as long as the others have a first claim."""
    worker = await make_worker("here")
    await _see_room(redis, hung=16)
    rids = {(await submit(queue)).rid for _ in range(8)}
    taken: set[str] = set()

    async def look() -> bool:
        taken.update(entry.rid for entry in await worker.read(16 - len(taken), 60_000))
        return taken == rids

    await eventually(look, timeout=5)


async def test_a_request_whose_prefix_is_here_is_not_left_to_others(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker("here")
    await _submit_young(queue, redis, 0)
    for _ in range(4):
        await queue.submit(make_request(), max_waiting=1000, max_waiting_tokens=100_000, terms=Terms(prefer="here"))
    await _see_room(redis, idle=64)
    assert len(await worker.read(16, 0)) == 4


async def test_nothing_is_kept_for_a_worker_that_has_left(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    gone, here = await make_worker("gone"), await make_worker("here")
    assert await gone.read(16, 0) == []
    await _submit_young(queue, redis, 1)
    assert await here.read(4, 0) == [], "the other one has more empty seats"
    await gone.leave()
    assert len(await here.read(4, 0)) == 1


async def test_a_worker_that_wakes_too_early_for_what_is_kept_sleeps_on(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    gone, here = await make_worker("gone"), await make_worker("here")
    assert await gone.read(16, 0) == []
    await submit(queue)  # and its bell stays rung, while the request is kept for the other worker
    assert len(await here.read(4, 1000)) == 1
