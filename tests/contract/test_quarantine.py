"""A request that kills its workers dies alone: at most `max_tries` deaths, no neighbour convicted with it."""

from __future__ import annotations

import asyncio

import pytest

from shared.claims import Acquired, ClaimQueue
from shared.held import HeldRequests
from shared.messages import GenerateRequest
from shared.pending import release_consumer
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker, finish, log_of, reclaim_all, say, submit, take_one


async def test_progress_comes_before_suspects_and_suspects_come_alone(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    dead, worker = await make_worker("dead"), await make_worker("next", lease_ms=0)
    suspects = [await submit(queue) for _ in range(2)]
    good = [await submit(queue) for _ in range(3)]
    for acquired in await dead.acquire(await dead.read(5)):
        if acquired.request in good:
            await say(dead, acquired, 0)

    first = await reclaim_all(worker)
    assert {one.request.rid for one in first} == {one.rid for one in good}
    assert await worker.reclaim(9) == []  # unproved ones are held here: a suspect would not be alone
    for one in first:
        await say(worker, one, 1)
    seen = []
    for _ in suspects:
        [suspect] = await reclaim_all(worker)
        seen.append(suspect.request.rid)
        assert suspect.tries == 2
        assert await worker.reclaim(9) == []
        assert await worker.read(9, 1) == []
        await say(worker, suspect, 0)
    assert seen == [one.rid for one in suspects]


async def test_nothing_new_is_started_beside_a_suspect(queue: RequestQueue, make_worker: MakeWorker) -> None:
    dead, worker = await make_worker("dead"), await make_worker("next", lease_ms=0)
    await submit(queue)
    await take_one(dead)
    reading = asyncio.create_task(worker.read(4, 5_000))  # past the gate, blocked in Redis
    [suspect] = await reclaim_all(worker)
    fresh = await submit(queue)

    assert await worker.acquire(await reading) == []  # delivered, put back for a worker with nothing at stake

    other = await make_worker("other")
    [taken] = await reclaim_all(other)
    assert (taken.request.rid, taken.tries) == (fresh.rid, 1)
    await say(worker, suspect, 0)
    await submit(queue)
    assert len(await worker.read(4, 1000)) == 1


async def test_a_suspect_is_not_starved_by_new_requests(queue: RequestQueue, make_worker: MakeWorker) -> None:
    dead, worker = await make_worker("dead"), await make_worker("next")
    suspect = await submit(queue)
    await take_one(dead)
    await submit(queue)
    first = await take_one(worker)
    await release_consumer(worker._redis, "dead", "tiny")
    await submit(queue)

    assert await worker.reclaim(9) == []
    assert await worker.read(9, 1) == []  # makes room: nothing new until the unproved one has cleared
    await say(worker, first, 0)
    [taken] = await reclaim_all(worker)
    assert taken.request.rid == suspect.rid


@pytest.mark.parametrize("neighbours", [0, 1, 7])
async def test_a_poisonous_request_is_buried_after_two_deaths_and_its_neighbours_finish(
    queue: RequestQueue, make_worker: MakeWorker, neighbours: int
) -> None:
    """Workers die whenever they hold the poison and would start it; each death takes all that worker had with it."""
    good = [await submit(queue) for _ in range(neighbours)]
    poison = await submit(queue)
    good += [await submit(queue) for _ in range(neighbours)]
    deaths = 0
    while await _work_until_death(queue, await make_worker(f"w{deaths}", lease_ms=0), poison):
        deaths += 1

    assert deaths == 2
    [record] = await log_of(queue, poison.rid)
    assert record.end is not None
    assert record.end.code == "request_poisoned"
    assert [letter.rid for letter in await queue.dead_letters()] == [poison.rid]
    for request in good:
        last = (await log_of(queue, request.rid))[-1]
        assert last.end is not None
        assert last.end.code == ""


async def _work_until_death(queue: RequestQueue, worker: ClaimQueue, poison: GenerateRequest) -> bool:
    """Each step admits up to 4, then runs; True = the poison was among them, False = everything has ended."""
    running: dict[str, Acquired] = {}
    while (depth := await queue.depth("tiny")).waiting + depth.running:
        taken = await reclaim_all(worker, 4 - len(running))
        taken += await worker.acquire(await worker.read(4 - len(running), 1))
        running |= {one.request.rid: one for one in taken}
        if poison.rid in running:
            return True
        for rid, one in list(running.items()):
            await say(worker, one, one.next_seq)
            await finish(worker, one, one.next_seq + 1)
            del running[rid]
    return False


async def test_suspects_follow_each_other_without_a_pause(queue: RequestQueue, make_worker: MakeWorker) -> None:
    """After the first look for silent owners, reads alone bring them, one after the other."""
    dead, worker = await make_worker("dead"), await make_worker("next", lease_ms=0)
    suspects = [await submit(queue) for _ in range(5)]
    await dead.acquire(await dead.read(5))
    [first] = await reclaim_all(worker)
    await say(worker, first, 0)
    seen = [first.request.rid]
    for _ in range(4):
        [one] = await worker.acquire(await worker.read(4, 1000))
        seen.append(one.request.rid)
        await say(worker, one, 0)
    assert seen == [one.rid for one in suspects]


async def test_suspects_and_new_requests_take_turns(queue: RequestQueue, make_worker: MakeWorker) -> None:
    """A new request waits for one suspect, not for all; a suspect for a few new requests; never are they together."""
    dead, worker = await make_worker("dead"), await make_worker("next")
    suspects = [(await submit(queue)).rid for _ in range(3)]
    await dead.acquire(await dead.read(3))
    await release_consumer(worker._redis, "dead", "tiny")
    fresh = [(await submit(queue)).rid for _ in range(12)]
    rounds = [await reclaim_all(worker)]
    while sum(map(len, rounds)) < len(suspects) + len(fresh):
        assert await worker.read(20, 1) == [], "nothing beside a suspect, and no suspect beside what is unproved"
        for one in rounds[-1]:
            await say(worker, one, 0)
        rounds.append(await worker.acquire(await worker.read(20, 1000)))
    assert [[one.request.rid for one in taken] for taken in rounds] == [
        suspects[:1],
        fresh[:8],
        suspects[1:2],
        fresh[8:],
        suspects[2:],
    ]


async def test_a_suspect_is_alone_in_a_process_that_serves_several_shards(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    held = HeldRequests()
    dead = await make_worker("dead")
    here, there = await make_worker("w", held=held, lease_ms=0), await make_worker("w", held=held, shard=1)
    await submit(queue)
    await take_one(dead)
    elsewhere = await submit(queue, shard=1)

    [suspect] = await reclaim_all(here)
    assert await there.read(4, 1) == []
    await say(here, suspect, 0)
    assert (await take_one(there)).request.rid == elsewhere.rid


async def test_a_supervisor_hands_back_what_its_dead_worker_ran(queue: RequestQueue, make_worker: MakeWorker) -> None:
    dead, other = await make_worker("dead", lease_ms=60_000), await make_worker("other", lease_ms=60_000)
    running, unproved, unread = [await submit(queue) for _ in range(3)]
    first, _, _ = await dead.acquire(await dead.read(2)) + [None]  # type: ignore[list-item]
    await say(dead, first, 0)
    await dead.read(1)

    assert await release_consumer(other._redis, "dead", "tiny") == 3

    taken = await reclaim_all(other)
    assert {one.request.rid for one in taken} == {running.rid, unread.rid}
    for one in taken:
        await say(other, one, one.next_seq)
    [suspect] = await reclaim_all(other)
    assert (suspect.request.rid, suspect.tries) == (unproved.rid, 2)


async def test_a_restart_under_the_same_name_finds_its_own_entries_with_the_same_care(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    before = await make_worker("same", lease_ms=60_000)
    started, silent = await submit(queue), await submit(queue)
    one, _ = await before.acquire(await before.read(2))
    await say(before, one, 0)

    after = await make_worker("same", lease_ms=60_000)
    [first] = await after.acquire(await after.read(9, 1))
    assert first.request.rid == started.rid
    assert await after.read(9, 1) == []
    await say(after, first, 1)
    [second] = await after.acquire(await after.read(9, 1))
    assert (second.request.rid, second.tries) == (silent.rid, 2)
    assert [kind.name for kind in await say(before, one, 1)] == ["FENCED"]


async def test_a_drain_puts_back_what_was_read_but_not_started(queue: RequestQueue, make_worker: MakeWorker) -> None:
    draining, other = await make_worker("draining"), await make_worker("other")
    kept = await submit(queue)
    acquired = await take_one(draining)
    waiting = [await submit(queue) for _ in range(3)]
    await draining.read(3)

    assert await draining.release_all() == 3

    assert [one.request.rid for one in await reclaim_all(other)] == [one.rid for one in waiting]
    assert acquired.request.rid == kept.rid
    assert [kind.name for kind in await say(draining, acquired, 0)] == ["OK"]
