"""Who is served next: shares in turn by tokens, priority within a share, classes, and who is woken for it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from redis.asyncio import Redis

from shared import keys
from shared.claims import Acquired, ClaimQueue, Commit
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker, submit, take_one
from tests.support.records import end_record
from tests.support.wait import eventually

PLACE = (0, "tiny", "interactive")
QUEUE = keys.queue_key(*PLACE)


async def _shares(worker: ClaimQueue, count: int) -> list[str]:
    """The shares of the next `count` requests, taken one by one."""
    return [(await take_one(worker)).request.share for _ in range(count)]


async def _end(worker: ClaimQueue, acquired: Acquired, completion: int, cached: int = 0) -> None:
    prompt = acquired.request.prompt_tokens
    record = end_record(0, prompt, completion)
    await worker.commit([Commit(acquired.claim, 0, record, True, prompt, completion, cached)])


async def test_a_flood_of_one_share_does_not_delay_another(queue: RequestQueue, make_worker: MakeWorker) -> None:
    for _ in range(50):
        await submit(queue, share="flood")
    for _ in range(3):
        await submit(queue, share="quiet")

    assert await _shares(await make_worker(), 7) == ["flood", "quiet", "flood", "quiet", "flood", "quiet", "flood"]


async def test_a_heavier_share_gets_its_multiple(queue: RequestQueue, make_worker: MakeWorker) -> None:
    for _ in range(30):
        await submit(queue, share="three", weight=3.0)
        await submit(queue, share="one")

    served = Counter(await _shares(await make_worker(), 20))

    assert served == {"three": 15, "one": 5}


async def test_long_requests_cost_more_turns(queue: RequestQueue, make_worker: MakeWorker) -> None:
    """84 tokens against 21 a request: one for four."""
    for _ in range(20):
        await submit(queue, share="long", prompts=((1,) * 80,), max_tokens=4)
        await submit(queue, share="short", prompts=((1,) * 17,), max_tokens=4)

    assert Counter(await _shares(await make_worker(), 20)) == {"long": 4, "short": 16}


async def test_idling_earns_nothing(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    await submit(queue, share="idle")
    for _ in range(40):
        await submit(queue, share="busy")
    await _shares(worker, 31)  # "idle" had one turn long ago
    for _ in range(10):
        await submit(queue, share="idle")

    assert Counter(await _shares(worker, 10)) == {"idle": 5, "busy": 5}


@pytest.mark.parametrize(("completion", "cached", "then"), [(1000, 0, "other"), (0, 16, "same")])
async def test_what_a_request_really_cost_settles_the_account(
    queue: RequestQueue, make_worker: MakeWorker, completion: int, cached: int, then: str
) -> None:
    """Long answers were guessed too short; a prompt out of the cache and no answer cost nothing."""
    worker = await make_worker()
    for share in ("same", "other"):
        for _ in range(8):
            await submit(queue, share=share, prompts=((1,) * 16,), max_tokens=1000)
    first, second = await take_one(worker), await take_one(worker)
    assert {first.request.share, second.request.share} == {"same", "other"}
    same = first if first.request.share == "same" else second

    await _end(worker, same, completion, cached)

    assert await _shares(worker, 2) == [then, then] if completion else (await _shares(worker, 1)) == [then]


async def test_priority_orders_within_a_share_only(queue: RequestQueue, make_worker: MakeWorker) -> None:
    late = await submit(queue, share="a", priority=5)
    usual = [await submit(queue, share="a") for _ in range(3)]
    first = await submit(queue, share="a", priority=-100)
    other = await submit(queue, share="b", priority=100)
    worker = await make_worker()

    taken = [(await take_one(worker)).request.rid for _ in range(6)]

    assert taken.index(other.rid) <= 1  # b's turn comes whatever its own priorities are
    assert [rid for rid in taken if rid != other.rid] == [first.rid, *(one.rid for one in usual), late.rid]


async def test_room_is_counted_in_choices(queue: RequestQueue, make_worker: MakeWorker) -> None:
    for _ in range(4):
        await submit(queue, n=3)
    worker = await make_worker()
    assert len(await worker.read(4, 1)) == 2  # the second one has more choices than were left
    assert len(await worker.read(3, 1)) == 1


async def test_batch_work_takes_only_the_room_it_is_given(queue: RequestQueue, make_worker: MakeWorker) -> None:
    batch = [await submit(queue, klass="batch") for _ in range(4)]
    one = await submit(queue)
    worker = await make_worker()

    assert [entry.rid for entry in await worker.read(4, 1, batch=0)] == [one.rid]
    assert [entry.rid for entry in await worker.read(4, 1, batch=2)] == [entry.rid for entry in batch[:2]]
    await submit(queue)
    assert len(await worker.read(4, 1, batch=2)) == 2  # the interactive one uses room that batch might have had


async def test_the_last_seats_are_kept_from_those_who_have_many(queue: RequestQueue, make_worker: MakeWorker) -> None:
    for _ in range(6):
        await submit(queue, share="flood")
    worker = await make_worker()
    limits = {"reserve": 2, "has_many": ["flood"]}

    assert len(await worker.read(4, 1, **limits)) == 2  # type: ignore[arg-type]
    assert await worker.read(2, 1, **limits) == []  # type: ignore[arg-type]
    quiet = await submit(queue, share="quiet")
    assert [entry.rid for entry in await worker.read(2, 1, **limits)] == [quiet.rid]  # type: ignore[arg-type]


async def test_who_sleeps_on_a_reserve_hands_on_what_it_may_not_take(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    """The full one is woken first, and wakes the empty one, but not itself again and again."""
    full, empty = await make_worker("full"), await make_worker("empty")
    reading = asyncio.create_task(full.read(1, 60_000, reserve=1, has_many=["flood"]))
    await eventually(lambda: _sleepers(queue._redis, 1))
    other = asyncio.create_task(empty.read(8, 60_000))
    await eventually(lambda: _sleepers(queue._redis, 2))

    request = await submit(queue, share="flood")

    async with asyncio.timeout(5):
        assert await reading == []
        assert [entry.rid for entry in await other] == [request.rid]
    await submit(queue, share="flood")
    await queue._redis.config_resetstat()
    assert await full.read(1, 300, reserve=1, has_many=["flood"]) == []
    assert (await queue._redis.info("commandstats"))["cmdstat_evalsha"]["calls"] <= 3


async def test_a_nudge_ends_a_read_that_knows_too_little_room(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    await submit(queue, klass="batch")
    reading = asyncio.create_task(worker.read(4, 60_000, batch=0))
    await eventually(lambda: _sleepers(worker._redis, 1))

    await worker.nudge()

    async with asyncio.timeout(5):
        assert await reading == []
    assert len(await worker.read(4, 1)) == 1


async def test_one_submit_wakes_one_of_many_idle_workers(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    readings = [asyncio.create_task((await make_worker(f"w{i}")).read(4, 60_000)) for i in range(5)]
    await eventually(lambda: _sleepers(redis, 5))

    await submit(queue)

    done, asleep = await asyncio.wait(readings, return_when=asyncio.FIRST_COMPLETED)
    assert [len(reading.result()) for reading in done] == [1]
    assert await _sleepers(redis, 4)
    for reading in asleep:
        reading.cancel()
    await asyncio.gather(*asleep, return_exceptions=True)


async def test_what_one_worker_has_no_room_for_wakes_the_next(queue: RequestQueue, make_worker: MakeWorker) -> None:
    readings = [asyncio.create_task((await make_worker(f"w{i}")).read(1, 60_000)) for i in range(3)]
    await eventually(lambda: _sleepers(queue._redis, 3))
    await asyncio.gather(*(submit(queue) for _ in range(3)))

    async with asyncio.timeout(10):
        assert [len(entries) for entries in await asyncio.gather(*readings)] == [1, 1, 1]


async def _sleepers(redis: Redis, count: int) -> bool:
    return int((await redis.info("clients"))["blocked_clients"]) == count


async def test_positions_follow_the_turns(queue: RequestQueue) -> None:
    for _ in range(100):
        await submit(queue, share="flood")
    first, second = await submit(queue, share="quiet"), await submit(queue, share="quiet")

    ahead = [position.ahead for rid in (first.rid, second.rid) if (position := await queue.position(rid))]

    assert ahead == [0, 2]  # of equal virtual times either may be first; then one of the flood's for each of its own


async def test_tenants_shows_served_and_waiting(queue: RequestQueue, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    await submit(queue, share="a")
    await _end(worker, await take_one(worker), 10, cached=3)
    for _ in range(2):
        await submit(queue, share="b")

    found = [(use.share, use.served_tokens, use.waiting) for use in await queue.tenants("tiny")]

    assert found == [("a", 4 + 10 - 3, 0), ("b", 0, 2)]
