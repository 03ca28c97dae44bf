"""A request that nobody has run begins in the call that takes it."""

from __future__ import annotations

from redis.asyncio import Redis

from shared import keys
from shared.claims import ReplyKind
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker, reclaim_all, say, submit


async def test_a_new_request_begins_in_the_call_that_takes_it(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    """As an acquire would have begun it: owner, lease, one try, no waiting tokens; records are committed as always."""
    request = await submit(queue)
    worker = await make_worker("w1")

    [entry] = await worker.read(1, begin=1)

    assert entry.epoch == 1
    fields = ["owner", "holder", "tries", "epoch"]
    owner, *rest = await redis.hmget(keys.request_key(request.rid), fields)
    assert owner.startswith(b"1.")
    assert rest == [b"w1", b"1", b"1"]
    assert await redis.hexists(keys.request_key(request.rid), "lease")
    assert (await queue.depth("tiny")).waiting_tokens == 0
    [acquired] = await worker.acquire([entry])
    assert (acquired.request, acquired.next_seq, acquired.tries) == (request, 0, 1)
    assert await say(worker, acquired, 0) == [ReplyKind.OK]


async def test_what_acquire_must_look_at_does_not_begin_when_taken(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    late = await submit(queue, deadline_ms=1)
    worker = await make_worker("w1")

    [entry] = await worker.read(1, begin=1)

    assert (entry.rid, entry.epoch) == (late.rid, 0)
    assert await worker.acquire([entry]) == []
    assert await redis.hget(keys.request_key(late.rid), "state") == b"done"


async def test_a_drain_gives_back_what_began_in_a_call_whose_reply_nobody_saw(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    unseen, running = await submit(queue), await submit(queue)
    leaving, staying = await make_worker("w1"), await make_worker("w2")
    first, second = await leaving.read(2, begin=2)
    assert first.rid == unseen.rid
    await leaving.acquire([second])

    assert await leaving.release_all() == 1

    [acquired] = await reclaim_all(staying)
    assert (acquired.claim.rid, acquired.tries, acquired.claim.epoch) == (unseen.rid, 1, 2)
    assert (await redis.hget(keys.request_key(running.rid), "holder")) == b"w1"
