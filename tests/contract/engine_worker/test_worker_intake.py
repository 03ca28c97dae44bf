"""How work spreads: slots, shards, classes, several workers on one queue."""

from __future__ import annotations

from redis.asyncio import Redis

from engine_worker.models.base import LoadedModel
from shared.prefixes import fingerprints
from shared.queue import RequestQueue
from shared.registry import load_prefixes
from tests.support.records import make_request
from tests.support.wait import eventually
from tests.support.workers import ask, finished, running_worker, submit, until_logged

SLOW = "step-delay-ms:10"
FOR_EVER = 3_600_000
"""A lease that never runs out: what moves was handed back."""


async def test_every_shard_is_served(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    async with running_worker(redis_url, tiny, shards=3, max_num_seqs=2):
        requests = [make_request(shard=i % 3, max_tokens=6) for i in range(12)]
        for request in requests:
            await submit(redis, request)
        answers = [await finished(redis, request.rid) for request in requests]
        assert len({tuple(answer.tokens()) for answer in answers}) == 1


async def test_what_exceeds_the_slots_goes_to_a_worker_with_room_uncharged(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny, max_num_seqs=4, lease_ms=FOR_EVER, fault=SLOW, max_tries=1) as first:
        requests = [make_request(n=4, max_tokens=60) for _ in range(4)]
        for request in requests:
            await submit(redis, request)
        await eventually(lambda: first.engine.stats().running == 4)
        async with running_worker(redis_url, tiny, max_num_seqs=4, lease_ms=FOR_EVER, max_tries=1) as second:
            answers = [await finished(redis, request.rid) for request in requests]
            assert second.engine.stats().counters["generation_tokens"] > 4 * 60
            assert {len(answer.tokens(3)) for answer in answers} == {60}
            assert {answer.end.code for answer in answers} == {""}


async def test_a_full_worker_leaves_the_rest_in_the_queue(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    async with running_worker(redis_url, tiny, max_num_seqs=2, lease_ms=FOR_EVER, fault=SLOW):
        long = [make_request(max_tokens=100) for _ in range(2)]
        waiting = [make_request(max_tokens=5) for _ in range(6)]
        for request in long:
            await submit(redis, request)
        for request in long:
            await until_logged(redis, request.rid, 1)
        for request in waiting:
            await submit(redis, request)
        depth = await RequestQueue(redis).depth("tiny", 0)
        assert (depth.waiting, depth.running) == (6, 2)
        for request in [*long, *waiting]:
            await finished(redis, request.rid)


async def test_interactive_requests_overtake_batch_ones(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    batch = [make_request(klass="batch", max_tokens=10) for _ in range(6)]
    for request in batch:
        await submit(redis, request)
    interactive = make_request(max_tokens=10)
    await submit(redis, interactive)
    async with running_worker(redis_url, tiny, max_num_seqs=1, fault=SLOW):
        await finished(redis, interactive.rid)
        states = [await RequestQueue(redis).state(request.rid) for request in batch]
        assert sum(state is not None and state.state == "done" for state in states) <= 1
        for request in batch:
            await finished(redis, request.rid)


async def test_a_cancellation_before_the_worker_comes_costs_no_prefill(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    request = make_request(n=2)
    await submit(redis, request)
    await RequestQueue(redis).cancel(request.rid)
    async with running_worker(redis_url, tiny) as running:
        await ask(redis, make_request(max_tokens=1))
        assert running.engine.stats().counters["prompt_tokens"] == 1 + 4  # the warm-up's and the other request's
    answer = await finished(redis, request.rid)
    assert [answer.last(index).finish_reason for index in (0, 1)] == ["abort", "abort"]


async def test_batch_work_gives_its_seat_to_an_interactive_request(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny, max_num_seqs=1, fault=SLOW):
        batch = [make_request(klass="batch", max_tokens=150) for _ in range(3)]
        for request in batch:
            await submit(redis, request)
        await until_logged(redis, batch[0].rid, 1)

        await ask(redis, make_request(max_tokens=5))

        states = [await RequestQueue(redis).state(request.rid) for request in batch]
        assert [state is not None and state.state for state in states] == ["open"] * 3
        for request in batch:
            assert len((await finished(redis, request.rid)).tokens()) == 150


async def test_batch_work_waits_in_the_queue_until_a_seat_is_free_and_then_begins_at_once(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny, max_num_seqs=2, fault=SLOW) as running:
        long = [make_request(max_tokens=100) for _ in range(2)]
        for request in long:
            await submit(redis, request)
        for request in long:
            await until_logged(redis, request.rid, 1)
        batch = make_request(klass="batch", max_tokens=3)
        await submit(redis, batch)
        await until_logged(redis, long[0].rid, 20)
        state = await RequestQueue(redis).state(batch.rid)
        assert state is not None
        assert state.epoch == 0
        assert running.worker._intake.empty_slots <= 0
        for request in [*long, batch]:
            await finished(redis, request.rid)


async def test_a_worker_tells_which_prompts_it_has_cached(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    prompt = tuple(range(3, 3 + 130))
    async with running_worker(redis_url, tiny, worker_id="teller"):
        await ask(redis, make_request(prompts=(prompt,), max_tokens=1))

        async def told() -> bool:
            [held] = (await load_prefixes(redis, ["teller"])).values()
            return held == {digest for _, digest in fingerprints(prompt)}

        await eventually(told)
    assert await load_prefixes(redis, ["teller"]) == {"teller": frozenset()}
    async with running_worker(redis_url, tiny, worker_id="silent", enable_prefix_caching=False):
        await ask(redis, make_request(prompts=(prompt,), max_tokens=1))
        assert await redis.exists("hr:prefixes:silent") == 0


async def test_a_worker_tells_no_longer_what_an_answer_has_displaced(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    prompt = tuple(range(3, 3 + 130))
    memory = 256 * tiny.config.kv_bytes_per_token()
    async with running_worker(redis_url, tiny, worker_id="teller", kv_cache_memory=memory) as running:
        room = running.engine.max_request_tokens()
        await ask(redis, make_request(prompts=(prompt,), max_tokens=1))
        await ask(redis, make_request(max_tokens=room - 100))

        async def told() -> bool:
            [held] = (await load_prefixes(redis, ["teller"])).values()
            return held == {digest for _, digest in fingerprints(prompt)[:1]}

        await eventually(told)
        again = await ask(redis, make_request(prompts=(prompt,), max_tokens=1))
        assert 64 <= again.end.usage.cached_tokens < 128


async def test_who_wants_little_begins_at_once_beside_a_flood(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    """Without waiting for one of the flood's answers to end, and those lose nothing by giving way."""
    async with running_worker(redis_url, tiny, max_num_seqs=4, fault=SLOW) as running:
        await ask(redis, make_request(share="quiet", max_tokens=1))
        flood = [make_request(share="flood", max_tokens=100) for _ in range(10)]
        for request in flood:
            await submit(redis, request)
        await eventually(lambda: running.engine.stats().running == 4)

        quiet = [make_request(share="quiet", max_tokens=3) for _ in range(2)]
        for request in quiet:
            await submit(redis, request)
        for request in quiet:
            await finished(redis, request.rid)

        states = [await RequestQueue(redis).state(request.rid) for request in flood]
        assert [state is not None and state.state for state in states] == ["open"] * 10
        answers = [await finished(redis, request.rid, timeout=60) for request in flood]
        assert len({tuple(answer.tokens()) for answer in answers}) == 1


async def test_a_share_that_is_alone_has_every_seat_and_yields_none(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny, max_num_seqs=4, fault=SLOW) as running:
        requests = [make_request(share="alone", max_tokens=40) for _ in range(6)]
        for request in requests:
            await submit(redis, request)
        await eventually(lambda: running.engine.stats().running == 4)
        assert running.worker.outbox.num_yielding() == 0
        for request in requests:
            await finished(redis, request.rid)
        assert running.engine.stats().counters["preemptions"] == 0
