"""A worker and a Redis in trouble: restarted, gone back, flushed, stalled; and a cancellation that was missed."""

from __future__ import annotations

import asyncio

import msgspec
from redis.asyncio import Redis

from engine_worker.models.base import LoadedModel
from shared.connections import command_client
from shared.keys import log_key, request_key
from shared.params import StopConditions
from shared.registry import list_models, load_blob
from tests.support.records import again, make_request
from tests.support.redis_server import RedisServer
from tests.support.wait import eventually
from tests.support.workers import ask, finished, running_worker, submit, until_logged

SLOW = "step-delay-ms:10"


async def test_a_restarted_redis_costs_a_pause_and_no_token(own_redis: RedisServer, tiny: LoadedModel) -> None:
    redis = command_client(own_redis.url)
    request = make_request(max_tokens=200)
    async with running_worker(own_redis.url, tiny, fault=SLOW):
        whole = await ask(redis, again(msgspec.structs.replace(request, stop=StopConditions(max_tokens=200))))
        await submit(redis, request)
        await until_logged(redis, request.rid, 3)
        await asyncio.to_thread(own_redis.restart)
        answer = await finished(redis, request.rid, 30)
        assert (answer.tokens(), answer.text()) == (whole.tokens(), whole.text())
        assert answer.end.usage.completion_tokens == 200
    await redis.aclose()


async def test_rd_11_a_log_that_went_backwards_is_sent_again(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    request = make_request(max_tokens=60)
    async with running_worker(redis_url, tiny, fault=SLOW):
        await submit(redis, request)
        before = await until_logged(redis, request.rid, 10)
        await go_back(redis, request.rid, 4)
        answer = await finished(redis, request.rid)
        assert answer.payloads[:10] == before.payloads[:10]
        assert len(answer.tokens()) == 60


async def go_back(redis: Redis, rid: str, records: int) -> None:
    """What a failover to a lagging replica does: the log and its counter as they were after `records`."""
    rows = (await redis.xrange(log_key(rid)))[:records]
    assert len(rows) == records
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hset(request_key(rid), "next", str(records))
        pipe.delete(log_key(rid))
        for entry, fields in rows:
            pipe.xadd(log_key(rid), fields, id=entry)
        pipe.pexpire(log_key(rid), 60_000)
        await pipe.execute()


async def test_flushall_frees_the_engine_and_brings_the_model_back(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny, fault=SLOW, lease_ms=400) as running:
        await eventually(lambda: list_models(redis))
        await submit(redis, make_request(max_tokens=400))
        await eventually(lambda: running.engine.stats().running == 1)
        await redis.flushall()
        await eventually(lambda: running.engine.stats().running == 0)
        card = (await eventually(lambda: list_models(redis)))["tiny"]
        assert await load_blob(redis, card.tokenizer) == tiny.tokenizer_json
        assert (await load_blob(redis, card.chat_template)).decode() == tiny.chat_template
        assert len((await ask(redis, make_request(max_tokens=3))).tokens()) == 3


async def test_a_missed_cancellation_is_found_with_the_next_renewal(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny, fault=SLOW, lease_ms=400):
        request = make_request(max_tokens=400)
        await submit(redis, request)
        await until_logged(redis, request.rid, 2)
        await redis.hset(request_key(request.rid), "cancel", "1")  # the flag without its notification
        assert (await finished(redis, request.rid)).last().finish_reason == "abort"


async def test_a_stalled_redis_pauses_the_engine_and_keeps_every_token(
    own_redis: RedisServer, tiny: LoadedModel
) -> None:
    redis = command_client(own_redis.url)
    request = make_request(max_tokens=480, prompts=((1, 2, 3, 4),))
    requests = [again(request) for _ in range(8)]
    async with running_worker(
        own_redis.url,
        tiny,
    ) as running:
        running.worker.outbox.backlog_limit = 256
        for one in requests:
            await submit(redis, one)
        await until_logged(redis, requests[-1].rid, 1)
        own_redis.freeze()
        await eventually(lambda: running.worker.outbox.congested)
        seen = running.engine.stats().counters["generation_tokens"]
        assert running.worker.outbox.backlog < 256 + 64 * 8 + 8
        own_redis.thaw()
        answers = [await finished(redis, one.rid, 30) for one in requests]
        assert {len(answer.tokens()) for answer in answers} == {480}
        assert len({answer.text() for answer in answers}) == 1
        assert seen < 8 * 480
    await redis.aclose()
