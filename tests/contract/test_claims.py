"""The worker's side: one owner at a time, every write fenced, one terminal record, nothing lost."""

from __future__ import annotations

from datetime import UTC, datetime

from redis.asyncio import Redis

from shared import keys
from shared.claims import Commit, ReplyKind
from shared.messages import decode_record
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker, finish, log_of, reclaim_all, say, submit, take_one
from tests.support.records import end_record, token_record, tokens_of
from tests.support.wait import eventually

OK, DUP, GAP, FENCED = ReplyKind.OK, ReplyKind.DUP, ReplyKind.GAP, ReplyKind.FENCED
QUEUE = keys.queue_key(0, "tiny", "interactive")


async def test_read_serves_interactive_before_batch_and_never_more_than_asked(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    batch = [await submit(queue, klass="batch") for _ in range(2)]
    interactive = [await submit(queue) for _ in range(3)]
    worker = await make_worker()

    first, second = await worker.read(4), await worker.read(4)

    assert [entry.rid for entry in first] == [one.rid for one in [*interactive, batch[0]]]
    assert [entry.rid for entry in second] == [batch[1].rid]
    assert await worker.read(0) == []
    assert await worker.read(1, 10) == []


async def test_an_acquired_request_comes_with_its_log(queue: RequestQueue, make_worker: MakeWorker) -> None:
    first, second = await make_worker("w1", lease_ms=30), await make_worker("w2", lease_ms=30)
    request = await submit(queue)
    before = await take_one(first)
    assert (before.claim.epoch, before.next_seq, before.records, before.tries) == (1, 0, [], 1)
    await say(first, before, 0, 1)

    [after] = await eventually(lambda: reclaim_all(second))

    assert after.request == request
    assert (after.claim.epoch, after.next_seq, after.tries) == (2, 2, 1)
    assert tokens_of(after.records) == [100, 101]


async def test_commit_answers_each_record(queue: RequestQueue, make_worker: MakeWorker, redis: Redis) -> None:
    worker = await make_worker()
    request, other = await submit(queue), await submit(queue)
    one, two = await worker.acquire(await worker.read(2))

    replies = await worker.commit(
        [
            Commit(one.claim, 0, token_record(0)),
            Commit(two.claim, 1, token_record(1)),
            Commit(one.claim, 1, token_record(1)),
            Commit(one.claim, 1, token_record(1)),
            Commit(two.claim, 0, token_record(0)),
        ]
    )

    assert [(r.kind, r.next) for r in replies] == [(OK, 1), (GAP, 0), (OK, 2), (DUP, 2), (OK, 1)]
    assert len(await log_of(queue, request.rid)) == 2
    assert await finish(worker, one, 2) is OK
    assert await finish(worker, one, 2) is DUP  # a replay of the terminal record means "done" to its owner
    assert await say(worker, one, 3) == [ReplyKind.CLOSED]
    await redis.delete(keys.request_key(other.rid))
    assert await say(worker, two, 1) == [ReplyKind.GONE]
    assert await worker.commit([]) == []


async def test_records_are_published_in_order_and_equal_the_log(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker()
    request = await submit(queue)
    pubsub = redis.pubsub()
    await pubsub.subscribe(keys.channel_name(request.rid))
    await pubsub.get_message(timeout=5)
    acquired = await take_one(worker)

    await say(worker, acquired, 0, 1, 1, 2)
    await finish(worker, acquired, 3)

    published = [(await pubsub.get_message(timeout=5) or {})["data"] for _ in range(4)]
    assert published == await queue.read_log(request.rid)
    assert await pubsub.get_message(timeout=0) is None
    await pubsub.aclose()


async def test_rd_30_the_terminal_record_closes_everything_in_one_call(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker(retention_ms=5_000)
    request = await submit(queue, tenant="acme")
    acquired = await take_one(worker)
    await say(worker, acquired, 0)
    before = datetime.now(UTC)

    await finish(worker, acquired, 1)

    state = await queue.state(request.rid)
    assert state is not None
    assert (state.state, state.next) == ("done", 2)
    assert await redis.xlen(QUEUE) == 0
    assert (await redis.xpending(QUEUE, keys.GROUP))["pending"] == 0
    assert 0 < await redis.pttl(keys.request_key(request.rid)) <= 5_000
    assert 0 < await redis.pttl(keys.log_key(request.rid)) <= 5_000
    days = {f"{moment:%Y%m%d}" for moment in (before, datetime.now(UTC))}
    [ledger] = [book for day in days if (book := await redis.hgetall(keys.ledger_key(0, "acme", day)))]
    assert ledger == {b"requests": b"1", b"prompt_tokens": b"4", b"completion_tokens": b"1"}
    # a sweep that comes later finds nothing to do, and nobody can end it again
    assert await reclaim_all(await make_worker("w2", lease_ms=0)) == []
    assert not await queue.cancel(request.rid)
    assert len(await log_of(queue, request.rid)) == 2


async def test_rd_15_a_paused_owner_can_write_renew_hand_back_and_bury_nothing(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    paused, other = await make_worker("paused", lease_ms=30), await make_worker("other", lease_ms=30)
    request = await submit(queue)
    old = await take_one(paused)
    await say(paused, old, 0)
    [new] = await eventually(lambda: reclaim_all(other))

    assert await say(paused, old, 1) == [FENCED]
    assert await finish(paused, old, 1) is FENCED
    assert [reply.kind for reply in await paused.renew([old.claim])] == [FENCED]
    assert await paused.bury(old.claim, "engine_failure", "No.") is FENCED
    await paused.hand_back([old.claim])

    assert await say(other, new, 1) == [OK]
    assert await finish(other, new, 2) is OK
    assert tokens_of(await queue.read_log(request.rid)) == [100, 101]


async def _silent_for(redis: Redis, ms: int) -> None:
    """The one pending entry was not renewed for so long."""
    name = keys.queue_key(0, "tiny", "interactive")
    [item] = await redis.xpending_range(name, keys.GROUP, "-", "+", 10)
    one = [item["message_id"]]
    await redis.xclaim(name, keys.GROUP, item["consumer"], 0, one, idle=ms, justid=True)


async def test_rl_18_what_a_worker_lost_by_its_silence_it_leaves_to_others_for_another_lease(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    paused, other, third = [await make_worker(name) for name in ("paused", "other", "third")]
    for taker, silent_ms in ((third, 10_500), (paused, 20_500)):
        await submit(queue)
        old = await take_one(paused)
        await say(paused, old, 0)
        await _silent_for(redis, 10_500)
        [new] = await reclaim_all(other)
        assert await say(paused, old, 1) == [FENCED]
        await say(other, new, 1)
        await _silent_for(redis, 10_500)
        assert await reclaim_all(paused) == []
        await _silent_for(redis, silent_ms)
        [last] = await reclaim_all(taker)
        assert await finish(taker, last, 2) is OK


async def test_rl_18_a_hand_back_is_for_everybody(queue: RequestQueue, make_worker: MakeWorker, redis: Redis) -> None:
    paused, other = await make_worker("paused"), await make_worker("other")
    await submit(queue)
    old = await take_one(paused)
    await say(paused, old, 0)
    await _silent_for(redis, 10_500)
    [new] = await reclaim_all(other)
    assert [reply.kind for reply in await paused.renew([old.claim])] == [FENCED]
    await other.hand_back([new.claim])
    [last] = await reclaim_all(paused)
    assert await finish(paused, last, 1) is OK


async def test_an_equal_epoch_of_another_process_is_no_right_to_write(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    """RD-10: a failover may take the epoch back; the number then comes twice."""
    first, second = await make_worker("w1"), await make_worker("w2", lease_ms=0)
    request = await submit(queue)
    old = await take_one(first)
    await redis.hset(keys.request_key(request.rid), mapping={"epoch": 0, "owner": ""})
    [new] = await reclaim_all(second)

    assert new.claim.epoch == old.claim.epoch
    assert await say(first, old, 0) == [FENCED]
    assert await say(second, new, 0) == [OK]


async def test_rd_13_a_renewed_request_is_nobody_elses(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    owner, other = await make_worker("owner", lease_ms=200), await make_worker("other", lease_ms=200)
    await submit(queue)
    acquired = await take_one(owner)
    [reply] = await owner.renew([acquired.claim])
    beginning = await redis.time()

    async def longer_than_three_leases() -> bool:
        assert [r.kind for r in await owner.renew([acquired.claim])] == [OK]
        assert await reclaim_all(other) == []
        seconds, micros = await redis.time()
        return (seconds - beginning[0]) * 1e6 + micros - beginning[1] > 600_000

    await eventually(longer_than_three_leases)
    assert not reply.cancelled
    [pending] = await redis.xpending_range(QUEUE, keys.GROUP, "-", "+", 9)
    assert (pending["consumer"], pending["times_delivered"]) == (b"owner", 1)


async def test_rd_21_a_hand_back_is_claimable_at_once_and_costs_no_try(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    await submit(queue)
    workers = [await make_worker(f"w{i}", lease_ms=60_000) for i in range(2)]
    acquired = await take_one(workers[0])
    for round_number in range(1, 7):
        holder, other = workers[(round_number - 1) % 2], workers[round_number % 2]
        await holder.hand_back([acquired.claim])
        await holder.hand_back([acquired.claim])  # a replay
        [acquired] = await reclaim_all(other)
        assert (acquired.tries, acquired.claim.epoch) == (1, round_number + 1)
    assert await finish(workers[0], acquired, 0) is OK


async def test_a_hand_back_wakes_the_others(queue: RequestQueue, make_worker: MakeWorker, redis: Redis) -> None:
    worker = await make_worker()
    await submit(queue)
    acquired = await take_one(worker)
    pubsub = redis.pubsub()
    await pubsub.subscribe(keys.control_channel(0))
    await pubsub.get_message(timeout=5)

    await worker.hand_back([acquired.claim])

    message = await pubsub.get_message(timeout=5)
    await pubsub.aclose()
    assert message is not None
    assert message["data"] == b"wake"


async def test_bury_ends_with_the_error_and_keeps_a_dead_letter(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    request = await submit(queue)
    acquired = await take_one(worker)
    await say(worker, acquired, 0)

    assert await worker.bury(acquired.claim, "engine_failure", "It broke.") is OK
    assert await worker.bury(acquired.claim, "engine_failure", "It broke.") is ReplyKind.CLOSED

    last = (await log_of(queue, request.rid))[-1]
    assert last.end is not None
    assert (last.end.code, last.end.message, last.end.usage.completion_tokens) == ("engine_failure", "It broke.", 1)
    assert [letter.rid for letter in await queue.dead_letters()] == [request.rid]


async def test_a_full_log_of_unicode_records_survives(queue: RequestQueue, make_worker: MakeWorker) -> None:
    """Payloads are bytes to every script: nothing re-encodes them."""
    worker = await make_worker()
    request = await submit(queue)
    acquired = await take_one(worker)
    payloads = [token_record(0), bytes(range(256)), end_record(2)]
    await worker.commit([Commit(acquired.claim, seq, payload) for seq, payload in enumerate(payloads)])
    assert await queue.read_log(request.rid) == payloads
    assert decode_record(payloads[2]).end is not None
