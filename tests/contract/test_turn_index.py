"""The index of turns: it may be lost, be older than the entries, or answer twice, and nobody is forgotten."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from shared import keys
from shared.queue import RequestQueue
from shared.scripts import TAKE
from tests.support.queue_steps import MakeWorker, finish, submit, take_one
from tests.support.wait import eventually

PLACE = (0, "tiny", "interactive")


@pytest.mark.parametrize("lost", ["wait", "turn", "both", "load", "share"])
async def test_a_lost_index_is_made_again_and_nobody_is_forgotten(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis, lost: str
) -> None:
    worker, other = await make_worker("w1"), await make_worker("w2")
    running = await take_one(worker) if (await submit(queue, share="a")) else None
    requests = [await submit(queue, share=share) for share in "abc" for _ in range(90)]
    names = {
        "wait": [keys.wait_key(*PLACE)],
        "turn": [keys.turn_key(*PLACE)],
        "both": [keys.wait_key(*PLACE), keys.turn_key(*PLACE)],
        "load": [keys.load_key(*PLACE)],
        "share": [keys.share_key(*PLACE, share) for share in "abc"],
    }
    await redis.delete(*names[lost])
    requests.append(await submit(queue, share="d"))  # comes to an index that has lost the others

    taken: list[str] = []

    async def all_taken() -> bool:
        taken.extend(entry.rid for entry in await other.read(16, 1))
        return len(taken) >= len(requests)

    await eventually(all_taken, timeout=20)
    assert sorted(taken) == sorted(request.rid for request in requests)
    assert running is not None
    assert await finish(worker, running, 0) == 0


async def test_entries_of_an_older_version_are_served(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    """Without a place in the order, without the fields that give it one."""
    request = await submit(queue)
    await redis.delete(keys.wait_key(*PLACE), keys.turn_key(*PLACE))
    await redis.hdel(keys.request_key(request.rid), "share", "weight", "priority", "max_out")

    acquired = await take_one(await make_worker())

    assert acquired.request == request


async def test_a_place_in_the_order_alone_is_no_request(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    """An index from before a failover: its entry is gone, or runs already."""
    worker, other = await make_worker("w1"), await make_worker("w2")
    await submit(queue)
    [member] = await redis.zrange(keys.wait_key(*PLACE), 0, -1)
    acquired = await take_one(worker)
    await redis.zadd(keys.wait_key(*PLACE), {member: 0})
    await redis.zadd(keys.turn_key(*PLACE), {"": 0})

    assert await other.read(4, 1) == []
    assert await finish(worker, acquired, 0) == 0
    await redis.zadd(keys.wait_key(*PLACE), {member: 0})
    await redis.zadd(keys.turn_key(*PLACE), {"": 0})
    assert await other.read(4, 1) == []
    assert await redis.zcard(keys.wait_key(*PLACE)) == 0


async def test_a_take_whose_reply_was_lost_gets_the_same_again(queue: RequestQueue, make_worker: MakeWorker) -> None:
    for _ in range(4):
        await submit(queue)
    worker = await make_worker()
    waiting = worker._waiting
    args = ["w1", "nonce", 2, 2, *waiting._prefixes, *waiting._owner, 1, 0]

    first = await TAKE(worker._redis, waiting._names, args)

    assert await TAKE(worker._redis, waiting._names, args) == first
    _, *rows = first
    assert [(rows[i], bool(rows[i + 1])) for i in (3, 8)] == [(1, True), (0, False)]  # one of two has begun
    assert (await queue.depth("tiny")).waiting == 2


async def test_what_ends_while_it_waits_leaves_the_order(queue: RequestQueue, redis: Redis) -> None:
    kept, cancelled = await submit(queue, share="a"), await submit(queue, share="b")

    assert await queue.cancel(cancelled.rid)

    assert await redis.zrange(keys.turn_key(*PLACE), 0, -1) == [b"a"]
    [member] = await redis.zrange(keys.wait_key(*PLACE), 0, -1)
    assert member.endswith(kept.rid.encode())
