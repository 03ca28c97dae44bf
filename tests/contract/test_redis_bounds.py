"""What must stay bounded or exact however much runs: memory, script sizes, depth, groups."""

from __future__ import annotations

from redis.asyncio import Redis

from shared import keys
from shared.claims import Commit
from shared.messages import decode_record
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker, finish, reclaim_all, say, submit, take_one
from tests.support.records import token_record, tokens_of
from tests.support.wait import eventually

QUEUE = keys.queue_key(0, "tiny", "interactive")


async def test_rd_28_finished_requests_leave_nothing_behind(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker(retention_ms=1)
    for _ in range(300):
        await submit(queue)
    while entries := await worker.read(50, 1):
        for acquired in await worker.acquire(entries):
            await say(worker, acquired, 0)
            await finish(worker, acquired, 1)

    def own(names: list[bytes]) -> list[bytes]:
        return [name for name in names if b":req:" in name or b":log:" in name]

    async def all_expired() -> bool:
        return not own([name async for name in redis.scan_iter(count=1000)])

    await eventually(all_expired)
    assert await redis.xlen(QUEUE) == 0
    assert (await redis.xpending(QUEUE, keys.GROUP))["pending"] == 0


async def test_rd_31_ten_thousand_pending_entries_and_a_log_of_twenty_thousand(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    dead, worker = await make_worker("dead"), await make_worker("next", lease_ms=0)
    request = await submit(queue)
    acquired = await take_one(dead)
    for start in range(0, 20_000, 1000):
        await dead.commit([Commit(acquired.claim, seq, token_record(seq)) for seq in range(start, start + 1000)])
    async with redis.pipeline(transaction=False) as pipe:
        for _ in range(9_999):
            pipe.xadd(QUEUE, {"rid": keys.new_rid(0)})
        await pipe.execute()
    await redis.xreadgroup(keys.GROUP, "dead", {QUEUE: ">"}, count=10_000)  # as a crowd of workers leaves them
    assert (await redis.xpending(QUEUE, keys.GROUP))["pending"] == 10_000

    [after] = await worker.acquire(await worker.reclaim(64))  # the rest has no metadata: removed on the way

    assert tokens_of(after.records) == list(range(100, 20_100))
    assert await redis.xlen(QUEUE) == 1
    assert await queue.cancel(request.rid)
    await worker.hand_back([after.claim])
    third = await make_worker("third")
    assert await reclaim_all(third) == []
    [last] = [decode_record(record) for record in await queue.read_log(request.rid, after=19_999)]
    assert last.end is not None
    assert last.end.usage.completion_tokens == 20_000


async def test_rd_34_depth_is_right_after_deletions_and_trims(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker()
    for _ in range(10):
        await submit(queue)
    running = await worker.acquire(await worker.read(3))
    undelivered = [entry for entry, _ in await redis.xrange(QUEUE)][3:]
    await redis.xdel(QUEUE, undelivered[2], undelivered[5])

    depth = await queue.depth("tiny")

    assert (depth.waiting, depth.running) == (5, 3)
    await finish(worker, running[0], 0)
    depth = await queue.depth("tiny")
    assert (depth.waiting, depth.running) == (5, 2)


async def test_rd_35_groups_and_keys_do_not_grow_with_clients(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    """Every key has its TTL from the first write (the fixture checks the rest); one group whoever reads."""
    for i in range(10):
        worker = await make_worker(f"w{i}")
        await submit(queue)
        acquired = await take_one(worker)
        await say(worker, acquired, 0)
        assert await redis.pttl(keys.request_key(acquired.claim.rid)) > 0
        assert await redis.pttl(keys.log_key(acquired.claim.rid)) > 0
    assert [group["name"] for group in await redis.xinfo_groups(QUEUE)] == [b"workers"]
