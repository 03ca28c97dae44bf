"""Limits of a share, counted by Redis: requests and tokens a minute, open requests."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from shared import keys
from shared.claims import Commit
from shared.errors import RateLimited, Use
from shared.limits import Limits, Terms
from shared.queue import RequestQueue, Submitted
from tests.support.queue_steps import MakeWorker, finish, take_one
from tests.support.records import end_record, make_request


async def _send(queue: RequestQueue, limits: Limits, share: str = "a", **changes: object) -> Submitted:
    request = make_request(share=share, **changes)
    return await queue.submit(request, max_waiting=1000, max_waiting_tokens=10**6, terms=Terms(limits))


async def _accepted(queue: RequestQueue, limits: Limits, count: int, **changes: object) -> int:
    """How many of so many at once."""
    calls = [_send(queue, limits, **changes) for _ in range(count)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, Submitted | RateLimited) for one in outcomes)
    return sum(isinstance(one, Submitted) for one in outcomes)


async def _pass_time(redis: Redis, seconds: float, share: str = "a") -> None:
    """As if the last use were so much longer ago."""
    key = keys.limit_key(0, share)
    for name in (b"requests_at", b"tokens_at"):
        at = await redis.hget(key, name.decode())
        if at is not None:
            await redis.hset(key, name.decode(), str(int(at) - int(seconds * 1000)))


async def test_requests_a_minute(queue: RequestQueue, redis: Redis) -> None:
    limits = Limits(requests_per_minute=6)
    assert await _accepted(queue, limits, 20) == 6

    with pytest.raises(RateLimited) as refused:
        await _send(queue, limits)

    assert refused.value.body()["error"]["type"] == "requests"
    assert refused.value.body()["error"]["code"] == "rate_limit_exceeded"
    assert "Limit 6, Used 6, Requested 1" in refused.value.message
    assert refused.value.retry_after == pytest.approx(10, abs=2)  # one of six runs out in ten seconds
    await _pass_time(redis, 20)
    assert await _accepted(queue, limits, 20) == 2
    assert await _accepted(queue, limits, 3, share="b") == 3


async def test_tokens_a_minute_are_guessed_and_then_set_right(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker, limits = await make_worker(), Limits(tokens_per_minute=100)
    used = (await _send(queue, limits, max_tokens=46)).use
    assert used == Use(0, 1, 100, 50)
    assert (await _send(queue, limits, max_tokens=46)).use == Use(0, 1, 100, 100)
    with pytest.raises(RateLimited) as refused:
        await _send(queue, limits, max_tokens=46)
    assert refused.value.body()["error"]["type"] == "tokens"
    assert refused.value.retry_after == pytest.approx(30, abs=2)

    acquired = await take_one(worker)
    await worker.commit([Commit(acquired.claim, 0, end_record(0, 4, 6), True, 4, 6)])  # 10 tokens, not 50

    used = (await _send(queue, limits, max_tokens=26)).use
    assert used is not None
    assert used.tokens <= 60 + 30


async def test_what_ends_in_the_queue_costs_no_tokens(queue: RequestQueue) -> None:
    limits = Limits(tokens_per_minute=50)
    first = await _send(queue, limits, max_tokens=46)
    assert await queue.cancel(first.rid)
    assert (await _send(queue, limits, max_tokens=46)).created


async def test_a_request_larger_than_the_limit_runs_when_nothing_is_used(queue: RequestQueue, redis: Redis) -> None:
    limits = Limits(tokens_per_minute=50)
    assert (await _send(queue, limits, prompts=((1,) * 200,))).created
    with pytest.raises(RateLimited):
        await _send(queue, limits)
    await _pass_time(redis, 300)
    assert (await _send(queue, limits, prompts=((1,) * 200,))).created


async def test_open_requests(queue: RequestQueue, make_worker: MakeWorker, redis: Redis) -> None:
    worker, limits = await make_worker(), Limits(max_open=2)
    assert await _accepted(queue, limits, 5) == 2
    acquired = await take_one(worker)
    assert await _accepted(queue, limits, 1) == 0
    await finish(worker, acquired, 0)
    assert await _accepted(queue, limits, 5) == 1
    # one that vanished without an end does not hold its place for ever
    await redis.delete(keys.request_key((await take_one(worker)).claim.rid))
    assert await _accepted(queue, limits, 5) == 1


async def test_a_refusal_uses_nothing_and_a_repeated_call_only_once(queue: RequestQueue) -> None:
    limits = Limits(requests_per_minute=2)
    request = make_request(share="a")
    terms = Terms(limits)
    assert (await queue.submit(request, max_waiting=9, max_waiting_tokens=99, terms=terms)).created
    for _ in range(5):
        again = await queue.submit(request, max_waiting=9, max_waiting_tokens=99, terms=terms)
        assert (again.rid, again.created) == (request.rid, False)
    assert await _accepted(queue, limits, 9) == 1
