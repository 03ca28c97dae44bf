"""Streams, groups and logs that Redis lost or took back: every kind seen in public bug reports."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from shared import keys
from shared.claims import Acquired, Commit, ReplyKind
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker, finish, log_of, reclaim_all, say, submit, take_one
from tests.support.records import make_request, token_record, tokens_of
from tests.support.wait import eventually

OK = ReplyKind.OK
QUEUE = keys.queue_key(0, "tiny", "interactive")


async def test_rd_06_a_deleted_stream_is_read_again_and_lost_entries_come_back(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker()
    running = await submit(queue)
    acquired = await take_one(worker)
    waiting = [await submit(queue) for _ in range(5)]
    reading = asyncio.create_task(worker.read(8, 5_000))
    entries = await reading
    assert len(entries) == 5
    blocked = asyncio.create_task(worker.read(8, 10_000))
    await eventually(lambda: _blocked_clients(redis))

    await redis.delete(QUEUE)

    async with asyncio.timeout(2):
        assert all([await queue.restore(request, []) for request in waiting])
        assert not await queue.restore(running, [])  # it runs; the renewal gives it an entry again
        assert [reply.kind for reply in await worker.renew([acquired.claim])] == [OK]
        again = await blocked  # the first restored one woke it
        again += await worker.read(8, 1)
    assert [entry.rid for entry in again] == [request.rid for request in waiting]
    taken = await worker.acquire(again)
    assert {one.request.rid for one in taken} == {request.rid for request in waiting}
    assert await say(worker, acquired, 0) == [OK]
    assert await finish(worker, acquired, 1) is OK
    assert acquired.claim.epoch == 1


async def _blocked_clients(redis: Redis) -> int:
    return int((await redis.info("clients"))["blocked_clients"])


async def test_rd_06_a_group_that_stays_away_is_asked_for_in_moderation(make_worker: MakeWorker, redis: Redis) -> None:
    worker = await make_worker()
    await redis.config_resetstat()
    for _ in range(6):
        await redis.delete(QUEUE)
        assert await worker.read(1, 1) == []
    stats = await redis.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] <= 14  # two looks a read, and once for its predecessor's entries
    assert "cmdstat_xgroup|create" not in stats  # where nothing waits there is nothing to mend


async def test_rd_07_after_a_destroyed_group_nothing_is_skipped_and_nothing_done_twice(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker, other = await make_worker("w1"), await make_worker("w2")
    running = await submit(queue)
    acquired = await take_one(worker)
    ended = await submit(queue)
    await finish(worker, await take_one(worker), 0)
    await redis.xadd(QUEUE, {"rid": ended.rid})  # as a failover that lost the ack leaves it
    waiting = [await submit(queue) for _ in range(5)]

    await redis.xgroup_destroy(QUEUE, keys.GROUP)

    taken = await other.acquire(await other.read(9, 1000))
    assert [one.request.rid for one in taken] == [request.rid for request in waiting]
    # the running one is in no pending list now, but its lease is alive: it was left to w1
    assert [reply.kind for reply in await worker.renew([acquired.claim])] == [OK]
    assert await finish(worker, acquired, 0) is OK
    assert len(await log_of(queue, running.rid)) == 1
    assert len(await log_of(queue, ended.rid)) == 1
    assert await redis.xlen(QUEUE) == 5


async def test_rd_09_flushall_under_a_blocked_read_is_no_error(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker()
    request = await submit(queue)
    acquired = await take_one(worker)
    await say(worker, acquired, 0, 1)
    records = await queue.read_log(request.rid)
    blocked = asyncio.create_task(worker.read(1, 10_000))
    await eventually(lambda: _blocked_clients(redis))

    await redis.flushall()

    async with asyncio.timeout(2):
        assert await say(worker, acquired, 2) == [ReplyKind.GONE]
        assert await queue.restore(request, records)
        [again] = await worker.acquire(await blocked)
    assert tokens_of(again.records) == [100, 101]
    assert await say(worker, again, 2) == [OK]


async def test_rd_10_redelivered_running_work_is_left_to_its_owner(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    """A failover took the pending list back: the entry seems to wait again while its owner runs it."""
    owner, other = await make_worker("owner"), await make_worker("other", lease_ms=50)
    await submit(queue)
    acquired = await take_one(owner)
    await redis.xack(QUEUE, keys.GROUP, acquired.claim.entry_id)

    assert await other.read(1, 50) == []
    assert await say(owner, acquired, 0) == [OK]

    # and when the owner dies, the redelivered entry is what saves the request
    await redis.hdel(keys.request_key(acquired.claim.rid), "lease")
    third = await make_worker("third", lease_ms=50)

    async def look() -> list[Acquired]:
        assert await third.read(1, 1) == []
        return await reclaim_all(third)

    [after] = await eventually(look)
    assert after.next_seq == 1


async def test_rd_11_a_log_that_went_backwards_is_sent_again(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker()
    request = await submit(queue)
    acquired = await take_one(worker)
    await say(worker, acquired, 0, 1, 2, 3)
    await redis.hset(keys.request_key(request.rid), "next", 1)  # the new master is three records behind
    await redis.delete(keys.log_key(request.rid))
    await redis.xadd(keys.log_key(request.rid), {"d": token_record(0)}, id="1-0")
    await redis.pexpire(keys.log_key(request.rid), 60_000)

    [reply] = await worker.commit([Commit(acquired.claim, 4, token_record(4))])

    assert (reply.kind, reply.next) == (ReplyKind.GAP, 1)
    assert await say(worker, acquired, *range(reply.next, 5)) == [OK] * 4
    assert tokens_of(await queue.read_log(request.rid)) == [100, 101, 102, 103, 104]


async def test_rd_18_consumers_with_pending_entries_are_never_removed(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    dead, janitor = await make_worker("dead"), await make_worker("janitor", lease_ms=0)
    requests = [await submit(queue) for _ in range(8)]
    for acquired in await dead.acquire(await dead.read(8)):
        await say(dead, acquired, 0)

    assert await janitor.remove_dead_consumers(idle_ms=-1) == 0
    taken = await janitor.acquire(await janitor.reclaim(8))
    assert {one.request.rid for one in taken} == {one.rid for one in requests}
    for one in taken:
        await finish(janitor, one, 1)
    assert await janitor.remove_dead_consumers(idle_ms=600_000) == 0
    assert await janitor.remove_dead_consumers(idle_ms=-1) >= 2
    assert [group["pending"] for group in await redis.xinfo_groups(QUEUE)] == [0]


async def test_rd_22_a_dead_workers_request_is_back_after_one_lease(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    dead, other = await make_worker("dead", lease_ms=300), await make_worker("other", lease_ms=300)
    await submit(queue)
    acquired = await take_one(dead)
    await say(dead, acquired, 0)
    began = await redis.time()

    [after] = await eventually(lambda: reclaim_all(other), timeout=5)

    ended = await redis.time()
    waited = ended[0] - began[0] + (ended[1] - began[1]) / 1e6
    assert 0.2 < waited < 1.5
    assert after.next_seq == 1


async def test_rd_23_accepted_requests_survive_a_flood_and_a_trim(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker()
    outcomes = await asyncio.gather(
        *(queue.submit(make_request(), max_waiting=20, max_waiting_tokens=10_000) for _ in range(100)),
        return_exceptions=True,
    )
    accepted = [one for one in outcomes if not isinstance(one, BaseException)]
    assert len(accepted) == 20
    assert await redis.xlen(QUEUE) == 20
    trimmed = (await redis.xrange(QUEUE))[:12]
    await redis.xtrim(QUEUE, maxlen=8, approximate=False)

    for one in accepted:  # what a pod does whose stream stays silent
        state = await queue.state(one.rid)
        assert state is not None
        await queue.restore(state.request, [])

    assert (await queue.depth("tiny")).waiting == 20
    got: set[str] = set()
    while entries := await worker.read(8, 1):
        for acquired in await worker.acquire(entries):
            got.add(acquired.request.rid)
            await finish(worker, acquired, 0)
    assert got == {one.rid for one in accepted}
    assert len(trimmed) == 12


async def test_rd_25_a_trimmed_pending_entry_does_not_stop_a_restart(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    before = await make_worker("same")
    lost = await submit(queue)
    await before.read(1)
    await redis.xtrim(QUEUE, maxlen=0, approximate=False)
    waiting = await submit(queue)

    after = await make_worker("same")
    async with asyncio.timeout(2):
        [acquired] = await after.acquire(await after.read(4, 1000))

    assert acquired.request == waiting
    assert await queue.restore(lost, [])
    assert (await take_one(after)).request == lost
    assert (await queue.depth("tiny")).running == 2
