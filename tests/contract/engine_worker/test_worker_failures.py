"""A worker among failures: take-over, fencing, drain, hung and broken engines."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from redis.asyncio import Redis

from engine_worker.engine import Engine
from engine_worker.models.base import LoadedModel
from engine_worker.request import Request, TokenEvent
from engine_worker.worker import EXIT_ENGINE_FAILED, EXIT_ENGINE_HUNG, EXIT_OK
from shared.claims import Acquired, ClaimQueue, Commit, ReplyKind
from shared.messages import GenerateRequest
from shared.params import SamplingParams, StopConditions
from shared.queue import RequestQueue
from shared.registry import list_models, list_workers
from tests.support.records import again, make_request, token_record
from tests.support.wait import eventually
from tests.support.workers import ask, finished, other_worker, read_answer, running_worker, submit, until_logged

SLOW = "step-delay-ms:10"


async def take_one(queue: ClaimQueue) -> Acquired:
    """The one entry another worker left, as soon as it may be taken."""

    async def one() -> list[Acquired]:
        return await queue.acquire(await queue.reclaim(1) or await queue.read(1, block_ms=10))

    (acquired,) = await eventually(one)
    return acquired


TAKE_OVERS = [
    make_request(max_tokens=12),
    make_request(max_tokens=12, n=2, sampling=SamplingParams(seed=7)),
    make_request(
        max_tokens=12,
        sampling=SamplingParams(seed=5, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2),
    ),
]


@pytest.mark.parametrize("request_", TAKE_OVERS, ids=["greedy", "n2-seeded", "penalties"])
async def test_rl_15_a_take_over_at_every_record_continues_to_the_uninterrupted_answer(
    redis: Redis, redis_url: str, tiny: LoadedModel, request_: GenerateRequest
) -> None:
    async with running_worker(redis_url, tiny, fault="step-delay-ms:2"):
        whole = await ask(redis, again(request_))
    assert len(whole.records) > 4
    halves = [again(request_) for _ in range(len(whole.records) - 1)]
    async with other_worker(redis_url, lease_ms=200) as dead:
        for logged, half in enumerate(halves, 1):
            await submit(redis, half)
            (acquired,) = await dead.acquire(await dead.read(1, block_ms=1000))
            items = [Commit(acquired.claim, seq, whole.payloads[seq]) for seq in range(logged)]
            assert {reply.kind for reply in await dead.commit(items)} == {ReplyKind.OK}
    async with running_worker(redis_url, tiny, lease_ms=200):
        for logged, half in enumerate(halves, 1):
            answer = await finished(redis, half.rid)
            assert answer.payloads[:logged] == whole.payloads[:logged]
            for index in range(request_.num_choices):
                assert answer.tokens(index) == whole.tokens(index)
                assert answer.text(index) == whole.text(index)
                assert answer.last(index) is not None
            assert answer.end.usage.completion_tokens == whole.end.usage.completion_tokens


async def test_a_take_over_inside_a_stop_string_still_finds_it(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    base = make_request(max_tokens=30)
    async with running_worker(redis_url, tiny, fault="step-delay-ms:2"):
        free = await ask(redis, again(base))
        stop = free.text()[12:20]
        stopping = msgspec.structs.replace(base, stop=StopConditions(max_tokens=30, stop=(stop,)))
        whole = await ask(redis, again(stopping))
    assert whole.text() == free.text()[: free.text().find(stop)]
    halves = [again(stopping) for _ in range(len(whole.records) - 1)]
    async with other_worker(redis_url, lease_ms=200) as dead:
        for logged, half in enumerate(halves, 1):
            await submit(redis, half)
            (acquired,) = await dead.acquire(await dead.read(1, block_ms=1000))
            await dead.commit([Commit(acquired.claim, seq, whole.payloads[seq]) for seq in range(logged)])
    async with running_worker(redis_url, tiny, lease_ms=200):
        for half in halves:
            answer = await finished(redis, half.rid)
            assert (answer.text(), answer.tokens()) == (whole.text(), whole.tokens())
            assert answer.last().stop_reason == stop


async def test_sh_01_sh_02_a_drain_hands_running_requests_back_with_all_their_tokens_within_its_limit(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    request = make_request(max_tokens=400)
    async with running_worker(redis_url, tiny) as fast:
        whole = await ask(redis, again(request))
        assert await fast.stop() == EXIT_OK
    async with running_worker(redis_url, tiny, fault=SLOW) as running:
        await submit(redis, request)
        await until_logged(redis, request.rid, 5)
        started = time.monotonic()
        assert await running.stop() == EXIT_OK
        assert time.monotonic() - started < 2.0
        computed = running.engine.stats().counters["generation_tokens"]
    logged = await read_answer(redis, request.rid)
    assert 5 <= len(logged.tokens()) < 400
    assert computed - len(logged.tokens()) <= 2 + 1, "what was computed is logged (2 tokens belong to the warm-up)"
    assert await list_workers(redis) == []
    async with other_worker(redis_url) as other:
        acquired = await take_one(other)  # at once, not after a lease of 10 s
        assert acquired.tries == 1, "a hand-back is not charged"
        assert acquired.records == logged.payloads
        await other.hand_back([acquired.claim])
    async with running_worker(redis_url, tiny):
        answer = await finished(redis, request.rid)
        assert (answer.tokens(), answer.text()) == (whole.tokens(), whole.text())


async def test_a_drain_during_intake_leaves_nothing_behind(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    requests = [make_request(max_tokens=5) for _ in range(30)]
    async with running_worker(redis_url, tiny, fault=SLOW) as running:
        for request in requests:
            await submit(redis, request)
        assert await running.stop() == EXIT_OK
    async with running_worker(redis_url, tiny, lease_ms=3_600_000):  # nothing comes back by a lease running out
        for request in requests:
            assert len((await finished(redis, request.rid)).tokens()) == 5


async def test_rd_15_a_step_longer_than_limit_and_lease_loses_the_request_and_nothing_twice(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    request = make_request(max_tokens=8)
    settings = {"lease_ms": 300, "step_limit_ms": 300}
    async with running_worker(redis_url, tiny, fault="step-delay-ms:1200", **settings) as hung:
        await submit(redis, request)
        await eventually(lambda: hung.engine.stats().steps > 2)
        async with other_worker(redis_url, lease_ms=300) as other:
            acquired = await take_one(other)
            assert acquired.claim.epoch == 2
            before = await read_answer(redis, request.rid)

            async def is_fenced() -> bool:
                await other.renew([acquired.claim])
                return hung.worker.outbox.counters["dropped_fenced"] == 1

            await eventually(is_fenced)
            await eventually(lambda: hung.engine.stats().blocks_used == 0)
            assert (await read_answer(redis, request.rid)).payloads == before.payloads
            await other.hand_back([acquired.claim])
        assert not hung.task.done(), "it goes on serving"


async def test_rd_13_a_slow_generation_keeps_its_lease(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    request = make_request(max_tokens=30)
    async with running_worker(redis_url, tiny, fault="step-delay-ms:50", lease_ms=300):
        await submit(redis, request)
        async with other_worker(redis_url, lease_ms=300) as other:
            while (state := await RequestQueue(redis).state(request.rid)) is not None and state.state == "open":
                assert await other.reclaim(8) == []
                await asyncio.sleep(0.02)
        assert state is not None
        assert state.epoch == 1
        assert len((await finished(redis, request.rid)).tokens()) == 30


async def test_a_hung_engine_ends_the_process(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    async with running_worker(redis_url, tiny, fault="step-delay-ms:3000", step_limit_ms=100, lease_ms=300) as running:
        await submit(redis, make_request())
        assert await asyncio.wait_for(running.task, 10) == EXIT_ENGINE_HUNG


async def test_rd_30_a_broken_engine_ends_the_process_and_hands_back_only_what_made_progress(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    def break_with_the_second_request(engine: Engine) -> None:
        added, add, step = [], engine.add, engine.step

        def count(request: Request) -> None:
            added.append(request)
            add(request)

        def fail() -> list[TokenEvent]:
            if len(added) > 1:
                raise RuntimeError("device lost")
            return step()

        engine.add, engine.step = count, fail  # type: ignore[method-assign]

    proved, suspect = make_request(max_tokens=400), make_request(max_tokens=400)
    async with running_worker(redis_url, tiny, fault=SLOW, prepare=break_with_the_second_request) as running:
        await submit(redis, proved)
        await until_logged(redis, proved.rid, 2)
        await submit(redis, suspect)
        assert await asyncio.wait_for(running.task, 10) == EXIT_ENGINE_FAILED
    async with other_worker(redis_url) as other:
        acquired = await take_one(other)
        assert (acquired.claim.rid, acquired.tries) == (proved.rid, 1)
        await other.commit([Commit(acquired.claim, acquired.next_seq, token_record(acquired.next_seq))])
        assert await other.reclaim(8) == [], "the suspect stays charged until its lease runs out"
    state = await RequestQueue(redis).state(suspect.rid)
    assert state is not None
    assert (state.state, state.epoch) == ("open", 1)


async def test_the_registry_shows_state_and_counters(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    async with running_worker(redis_url, tiny, worker_id="w1") as running:
        await ask(redis, make_request(max_tokens=5))

        async def counted() -> bool:
            (card,) = await list_workers(redis) or [None]
            return card is not None and card.counters.get("finished_length") == 1.0

        await eventually(counted)
        (card,) = await list_workers(redis)
        assert (card.worker_id, card.state) == ("w1", "ready")
        assert card.kv_blocks_total > 0 == card.running
        assert card.kv_cache_bytes == running.engine._runner.kv_cache.num_bytes
        first = (await list_models(redis))["tiny"]
        async with running_worker(redis_url, tiny, worker_id="w2"):
            await eventually(lambda: _two(redis))
            assert (await list_models(redis))["tiny"] == first, "every worker publishes the same card"
        assert await running.stop() == EXIT_OK


async def _two(redis: Redis) -> bool:
    return len([card for card in await list_workers(redis) if card.state == "ready"]) == 2
