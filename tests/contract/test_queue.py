"""The pod's side: accept once, refuse honestly, cancel, look, restore."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from shared import keys
from shared.claims import Commit
from shared.errors import QueueFull
from shared.messages import Delta, decode_record
from shared.queue import Position, RequestQueue
from tests.support.queue_steps import MakeWorker, finish, log_of, reclaim_all, say, submit, take_one
from tests.support.records import make_request, token_record, tokens_of


async def test_a_submitted_request_is_what_its_state_says(queue: RequestQueue) -> None:
    request = await submit(queue, tenant="acme", deadline_ms=4_000_000_000_000)

    state = await queue.state(request.rid)

    assert state is not None
    assert (state.state, state.epoch, state.next, state.cancel) == ("open", 0, 0, False)
    assert (state.deadline_ms, state.tenant, state.request) == (4_000_000_000_000, "acme", request)
    assert await queue.state(keys.new_rid(0)) is None


async def test_the_same_call_sent_twice_is_one_request_and_says_created_again(redis: Redis) -> None:
    """A client resends when the reply was lost: same arguments, so the same nonce."""
    request = make_request()
    sent: list[tuple[object, ...]] = []

    class Recording:
        async def execute_command(self, *args: object) -> object:
            sent.append(args)
            return await redis.execute_command(*args)

    first = await RequestQueue(Recording()).submit(request, max_waiting=9, max_waiting_tokens=99)  # type: ignore[arg-type]
    again = await redis.execute_command(*sent[-1])

    assert first.created
    assert again == [1, request.rid.encode()]
    assert await redis.xlen(keys.queue_key(0, "tiny", "interactive")) == 1


async def test_a_second_call_with_a_known_rid_attaches(queue: RequestQueue) -> None:
    request = await submit(queue)

    second = await queue.submit(request, max_waiting=9, max_waiting_tokens=99)

    assert (second.rid, second.created) == (request.rid, False)
    assert (await queue.depth("tiny")).waiting == 1


async def test_sc_11_two_submits_with_one_idempotency_key_share_one_request(queue: RequestQueue) -> None:
    requests = [make_request() for _ in range(8)]

    submitted = await asyncio.gather(
        *(
            queue.submit(one, max_waiting=9, max_waiting_tokens=99, idempotency="digest", idempotency_ttl_ms=60_000)
            for one in requests
        )
    )

    assert len({one.rid for one in submitted}) == 1
    assert sum(one.created for one in submitted) == 1
    assert (await queue.depth("tiny")).waiting == 1


async def test_an_idempotency_key_of_an_expired_request_is_free_again(queue: RequestQueue, redis: Redis) -> None:
    first, second = make_request(), make_request()
    options = {"max_waiting": 9, "max_waiting_tokens": 99, "idempotency": "d", "idempotency_ttl_ms": 60_000}
    await queue.submit(first, **options)  # type: ignore[arg-type]
    await redis.delete(keys.request_key(first.rid))

    submitted = await queue.submit(second, **options)  # type: ignore[arg-type]

    assert (submitted.rid, submitted.created) == (second.rid, True)


async def test_a_full_queue_refuses_by_requests_and_by_tokens(queue: RequestQueue) -> None:
    for _ in range(3):
        await submit(queue)

    with pytest.raises(QueueFull, match="3 requests with 12 prompt tokens"):
        await queue.submit(make_request(), max_waiting=3, max_waiting_tokens=1000)
    with pytest.raises(QueueFull):
        await queue.submit(make_request(), max_waiting=9, max_waiting_tokens=15)
    assert (await queue.submit(make_request(), max_waiting=4, max_waiting_tokens=16)).created


async def test_a_lone_request_over_the_token_limit_is_let_in(queue: RequestQueue) -> None:
    assert (await queue.submit(make_request(prompts=((1,) * 50,)), max_waiting=9, max_waiting_tokens=10)).created


async def test_running_requests_do_not_count_as_waiting(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    await submit(queue)
    acquired = await take_one(worker)

    assert (await queue.submit(make_request(), max_waiting=1, max_waiting_tokens=4)).created
    depth = await queue.depth("tiny")
    assert (depth.waiting, depth.running, depth.waiting_tokens) == (1, 1, 4)

    await worker.hand_back([acquired.claim])
    depth = await queue.depth("tiny")
    assert (depth.waiting, depth.running, depth.waiting_tokens) == (2, 0, 8)


async def test_retry_after_follows_the_measured_drain_rate(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    """20 finishes within the last 30 s window at about 2/s; 10 too many requests need about 5 s."""
    worker = await make_worker()
    for _ in range(20):
        await submit(queue)
        await finish(worker, await take_one(worker), 0)
    seconds, micros = await redis.time()
    load = keys.load_key(0, "tiny", "interactive")
    await redis.hset(load, "since", str(seconds * 1000 + micros // 1000 - 9_000))
    for _ in range(20):
        await submit(queue)

    with pytest.raises(QueueFull) as full:
        await queue.submit(make_request(), max_waiting=11, max_waiting_tokens=1000)

    # 20 finishes seen, a window of 30 * (1 - exp(-10/30)) = 8.5 s: 2.35/s, ten too many
    assert full.value.retry_after == 5.0
    rid = (await submit(queue)).rid
    position = await queue.position(rid)
    assert position is not None
    assert position.ahead == 20
    assert position.expected_wait_s == pytest.approx(21 / 2.35, rel=0.05)


async def test_retry_after_stays_between_1_and_60_seconds(queue: RequestQueue, redis: Redis) -> None:
    await submit(queue)
    load = keys.load_key(0, "tiny", "interactive")
    for done, expected in (("0.000001", 60.0), ("1000000", 1.0)):
        await redis.hset(load, mapping={"done": done, "done_tokens": done, "since": "1", "at": "4000000000000"})
        await redis.hset(load, "at", str((await redis.time())[0] * 1000))
        with pytest.raises(QueueFull) as full:
            await queue.submit(make_request(), max_waiting=1, max_waiting_tokens=1000)
        assert full.value.retry_after == expected


async def test_waiting_tokens_heal_when_nothing_waits(queue: RequestQueue, redis: Redis) -> None:
    await redis.hset(keys.load_key(0, "tiny", "interactive"), "tokens", 999_999)

    await submit(queue)

    assert (await queue.depth("tiny")).waiting_tokens == 4


async def test_a_waiting_request_is_cancelled_by_the_script_itself(queue: RequestQueue, redis: Redis) -> None:
    request = await submit(queue, prompts=((1, 2), (3,)), n=2, tenant="acme")

    assert await queue.cancel(request.rid)

    [record] = await log_of(queue, request.rid)
    assert record.deltas == tuple(Delta(index=i, finish_reason="abort") for i in range(4))
    assert record.end is not None
    assert (record.end.code, record.end.usage.prompt_tokens, record.end.usage.completion_tokens) == ("", 3, 0)
    assert await redis.xlen(keys.queue_key(0, "tiny", "interactive")) == 0
    assert not await queue.cancel(request.rid)
    assert len(await log_of(queue, request.rid)) == 1


async def test_cancelling_a_running_request_sets_the_flag_and_tells_workers(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker()
    request = await submit(queue)
    acquired = await take_one(worker)
    pubsub = redis.pubsub()
    await pubsub.subscribe(keys.control_channel(0))
    await pubsub.get_message(timeout=5)

    assert await queue.cancel(request.rid)

    message = await pubsub.get_message(timeout=5)
    await pubsub.aclose()
    assert message is not None
    assert message["data"] == b"cancel:" + request.rid.encode()
    # SC-16: the notification may be lost, the flag is not
    [reply] = await worker.renew([acquired.claim])
    assert reply.cancelled
    assert await log_of(queue, request.rid) == []


async def test_cancelling_what_was_handed_back_keeps_its_usage(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    request = await submit(queue, n=2)
    acquired = await take_one(worker)
    record = token_record(1, 7, 8, index=1, finish_reason="stop")
    await say(worker, acquired, 0)
    await worker.commit([Commit(acquired.claim, 1, record)])
    await worker.hand_back([acquired.claim])

    assert await queue.cancel(request.rid)

    last = (await log_of(queue, request.rid))[-1]
    assert last.deltas == (Delta(index=0, finish_reason="abort"),)
    assert last.end is not None
    assert last.end.usage.completion_tokens == 3


async def test_cancel_of_an_unknown_request_is_false(queue: RequestQueue) -> None:
    assert not await queue.cancel(keys.new_rid(0))


async def test_read_log_pages_strictly_after_a_seq(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    request = await submit(queue)
    await say(worker, await take_one(worker), 0, 1, 2, 3, 4)

    assert [decode_record(r).seq for r in await queue.read_log(request.rid)] == [0, 1, 2, 3, 4]
    assert [decode_record(r).seq for r in await queue.read_log(request.rid, after=1, limit=2)] == [2, 3]
    assert await queue.read_log(request.rid, after=4) == []


async def test_position_counts_what_is_served_before(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    running = await submit(queue)
    await take_one(worker)
    batch = await submit(queue, klass="batch")
    first, second = await submit(queue), await submit(queue)

    assert await queue.position(running.rid) == Position(0, 0.0)
    assert await queue.position(first.rid) == Position(0, None)
    assert await queue.position(second.rid) == Position(1, None)
    assert await queue.position(batch.rid) == Position(2, None)
    assert await queue.position(keys.new_rid(0)) is None


async def test_restore_after_loss_continues_where_the_client_is(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    old = await make_worker("old")
    request = await submit(queue)
    before = await take_one(old)
    await say(old, before, 0, 1, 2)
    records = await queue.read_log(request.rid)
    await redis.flushall()

    outcomes = await asyncio.gather(*(queue.restore(request, records[:2]) for _ in range(5)))

    assert sorted(outcomes) == [False] * 4 + [True]
    new = await make_worker("new")
    acquired = await take_one(new)
    assert tokens_of(acquired.records) == [100, 101]
    assert acquired.next_seq == 2
    assert acquired.claim.epoch > before.claim.epoch
    # the owner from before the loss is fenced, whatever number its epoch had
    assert [kind.name for kind in await say(old, before, 2, 3)] == ["FENCED", "FENCED"]
    assert [kind.name for kind in await say(new, acquired, 2)] == ["OK"]


async def test_restore_does_nothing_while_nothing_is_lost(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    request = await submit(queue)
    assert not await queue.restore(request, [])
    acquired = await take_one(worker)
    assert not await queue.restore(request, [])
    await finish(worker, acquired, 0)
    assert not await queue.restore(request, [])
    assert (await queue.depth("tiny")).waiting == 0


async def test_dead_letters_can_be_listed_replayed_and_dropped(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    buried = [await submit(queue, tenant="acme") for _ in range(2)]
    for acquired in await worker.acquire(await worker.read(2, 1000)):
        await worker.bury(acquired.claim, "engine_failure", "It broke.")

    newest, oldest = await queue.dead_letters()
    assert [newest.rid, oldest.rid] == [buried[1].rid, buried[0].rid]
    assert (newest.code, newest.message, newest.model, newest.tenant) == ("engine_failure", "It broke.", "tiny", "acme")

    rid = await queue.replay(oldest.id)
    assert rid is not None
    assert (await take_one(worker)).request.prompts == buried[0].prompts
    assert await queue.drop(newest.id)
    assert not await queue.drop(newest.id)
    assert await queue.replay(newest.id) is None
    assert await queue.dead_letters() == []


async def test_two_models_and_two_shards_do_not_meet(queue: RequestQueue, make_worker: MakeWorker) -> None:
    await submit(queue, model="other")
    await submit(queue, shard=7)
    worker, elsewhere = await make_worker(), await make_worker(shard=7)

    assert await worker.read(9, 10) == []
    assert len(await elsewhere.read(9, 1000)) == 1
    assert (await queue.depth("tiny", 7)).running == 1
    assert await reclaim_all(worker) == []
