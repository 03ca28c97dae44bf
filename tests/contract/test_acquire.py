"""What acquire refuses, ends or survives before an engine sees anything."""

from __future__ import annotations

from redis.asyncio import Redis

from shared import keys
from shared.queue import RequestQueue
from shared.scripts import ACQUIRE
from tests.support.queue_steps import MakeWorker, log_of, reclaim_all, say, submit, take_one

QUEUE = keys.queue_key(0, "tiny", "interactive")


async def test_a_deadline_ends_a_request_only_before_it_began(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    now = (await redis.time())[0] * 1000
    late, soon = await submit(queue, deadline_ms=now - 1), await submit(queue, deadline_ms=now + 60_000)
    worker, other = await make_worker("w1", lease_ms=0), await make_worker("w2", lease_ms=0)

    [acquired] = await worker.acquire(await worker.read(2))

    assert acquired.request.rid == soon.rid
    [record] = await log_of(queue, late.rid)
    assert record.end is not None
    assert record.end.code == "deadline_exceeded"
    await say(worker, acquired, 0)
    await redis.hset(keys.request_key(soon.rid), "deadline", now - 1)
    [again] = await reclaim_all(other)
    assert again.next_seq == 1


async def test_a_cancelled_request_is_ended_by_the_acquire_that_takes_it_over(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    dead, other = await make_worker("dead"), await make_worker("other", lease_ms=0)
    request = await submit(queue)
    await say(dead, await take_one(dead), 0)
    assert await queue.cancel(request.rid)

    assert await reclaim_all(other) == []

    last = (await log_of(queue, request.rid))[-1]
    assert last.end is not None
    assert (last.end.usage.completion_tokens, last.deltas[0].finish_reason) == (1, "abort")


async def test_an_acquire_whose_reply_was_lost_does_not_charge_the_request(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    """The process is alive: it asks again, any number of times, and the request stays innocent."""
    await submit(queue)
    worker = await make_worker()
    [entry] = await worker.read(1)
    names, args = worker._begin.call(entry)
    first = await ACQUIRE(worker._redis, names, args)
    assert await ACQUIRE(worker._redis, names, args) == first  # the same call twice
    for _ in range(5):
        again = await ACQUIRE(worker._redis, *worker._begin.call(entry))
        assert (again[0], again[3]) == (b"RUN", 1)


async def test_a_body_of_another_layout_ends_its_request_only(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    foreign, good = await submit(queue), await submit(queue)
    await redis.hset(keys.request_key(foreign.rid), "body", b"\x81\xa3rid\x01")
    worker = await make_worker()

    [acquired] = await worker.acquire(await worker.read(2))

    assert acquired.request == good
    [record] = await log_of(queue, foreign.rid)
    assert record.end is not None
    assert record.end.code == "engine_failure"


async def test_entries_of_strangers_are_removed(queue: RequestQueue, make_worker: MakeWorker, redis: Redis) -> None:
    worker = await make_worker()
    await redis.xadd(QUEUE, {"rid": "not-a-rid"})
    await redis.xadd(QUEUE, {"something": "else"})
    await redis.xadd(QUEUE, {"rid": keys.new_rid(0)})  # its metadata has expired
    await submit(queue)

    assert len(await worker.acquire(await worker.read(9))) == 1
    assert await redis.xlen(QUEUE) == 1
