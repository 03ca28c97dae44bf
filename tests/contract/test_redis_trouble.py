"""Connections that break, wait or are cancelled; servers that are full, restarted or unfit: from public bug reports."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.claims import ClaimQueue, Commit, Consumer, ReplyKind
from shared.connections import REDIS_DOWN, UnfitServer, blocking_client, check_server, command_client
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker, finish, log_of, say, submit, take_one
from tests.support.records import make_request, token_record
from tests.support.redis_server import RedisServer
from tests.support.wait import eventually

OK = ReplyKind.OK


async def _keep_reading(worker: ClaimQueue, got: list[str]) -> None:
    """The read loop of a worker, without its engine: errors of Redis being away are retried at once."""
    while True:
        try:
            for acquired in await worker.acquire(await worker.read(8, 200)):
                got.append(acquired.request.rid)
                await say(worker, acquired, acquired.next_seq)
                await finish(worker, acquired, acquired.next_seq + 1)
        except REDIS_DOWN:
            await asyncio.sleep(0.01)


async def test_rd_01_an_idle_read_outlasts_the_default_socket_timeout(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    """redis-py's default of 5 s is what broke others: one read of 5.5 s, and its entry arrives at the very end."""
    worker = await make_worker()
    reading = asyncio.create_task(worker.read(1, 20_000))
    await asyncio.wait([reading], timeout=5.5)
    assert not reading.done()
    request = await submit(queue)
    async with asyncio.timeout(1):
        [entry] = await reading
    assert entry.rid == request.rid


async def test_rd_01_an_entry_delivered_to_an_abandoned_read_is_found_at_once(
    queue: RequestQueue, make_worker: MakeWorker
) -> None:
    """Reads cancelled at random moments around the arrival: whoever got the entry, the next read brings it."""
    worker = await make_worker()
    for step in range(60):
        reading = asyncio.create_task(worker.read(1, 1000))
        for _ in range(step % 12):
            await asyncio.sleep(0)
        adding = asyncio.create_task(submit(queue))
        for _ in range(step % 7):
            await asyncio.sleep(0)
        reading.cancel()
        results = await asyncio.gather(reading, adding, return_exceptions=True)
        entries = results[0] if isinstance(results[0], list) else await worker.read(1, 1000)
        [acquired] = await worker.acquire(entries)
        assert acquired.request == results[1]
        await finish(worker, acquired, 0)


async def test_rd_04_cancelled_commands_never_shift_replies_to_others(queue: RequestQueue, redis_url: str) -> None:
    client = command_client(redis_url, max_connections=3)
    small = RequestQueue(client)
    requests = [await submit(queue, tenant=f"t{i}") for i in range(20)]

    async def read_and_leave(index: int) -> None:
        task = asyncio.create_task(small.state(requests[index % 20].rid))
        for _ in range(index % 9):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def read_well(index: int) -> None:
        state = await small.state(requests[index % 20].rid)
        assert state is not None
        assert state.tenant == f"t{index % 20}"

    await asyncio.gather(*(call(i) for i in range(200) for call in (read_and_leave, read_well)))
    await client.aclose()


@pytest.mark.parametrize("awaits", [1, 2, 3, 5, 8, 13])
async def test_rd_05_a_cancelled_call_leaves_client_and_queue_usable(
    queue: RequestQueue, make_worker: MakeWorker, awaits: int
) -> None:
    worker = await make_worker()
    request = await submit(queue)
    acquired = await take_one(worker)
    calls = [
        lambda: queue.submit(make_request(), max_waiting=99, max_waiting_tokens=999),
        lambda: queue.state(request.rid),
        lambda: queue.read_log(request.rid),
        lambda: queue.depth("tiny"),
        lambda: worker.read(1, 50),
        lambda: worker.reclaim(1),
        lambda: worker.renew([acquired.claim]),
        lambda: worker.commit([Commit(acquired.claim, 0, token_record(0))]),
    ]
    for call in calls:
        task = asyncio.ensure_future(call())
        for _ in range(awaits):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(2):
        [reply] = await worker.commit([Commit(acquired.claim, 0, token_record(0))])
        assert reply.kind in (OK, ReplyKind.DUP)
        assert len(await log_of(queue, request.rid)) == 1


async def test_rd_27_an_unfit_server_is_refused_by_name(redis: Redis) -> None:
    info = await check_server(redis)
    assert info.name in ("redis", "valkey")
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(UnfitServer, match="maxmemory-policy allkeys-lru"):
            await check_server(redis)
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")


async def test_rd_29_killed_connections_never_stop_a_worker(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker, got = await make_worker(), []  # type: ignore[var-annotated]
    loop = asyncio.create_task(_keep_reading(worker, got))
    for _ in range(20):
        await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        request = await submit(queue)
        await eventually(lambda rid=request.rid: rid in got, timeout=3)  # type: ignore[misc]
        assert await eventually(lambda rid=request.rid: _ended(queue, rid), timeout=3)  # type: ignore[misc]
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def _ended(queue: RequestQueue, rid: str) -> bool:
    state = await queue.state(rid)
    return state is not None and (state.state, state.next) == ("done", 2)


async def test_rd_29_restarts_of_redis_with_its_log_lose_nothing(own_redis: RedisServer) -> None:
    commands, blocking = command_client(own_redis.url), blocking_client(own_redis.url)
    queue = RequestQueue(commands)
    worker = ClaimQueue(commands, blocking, Consumer("w", "tiny"))
    await worker.ensure_group()
    got: list[str] = []
    loop = asyncio.create_task(_keep_reading(worker, got))
    for _ in range(3):
        own_redis.restart()
        request = await submit(queue)
        await eventually(lambda rid=request.rid: _ended(queue, rid), timeout=5)  # type: ignore[misc]
    # appendfsync everysec: written is not yet synced, but SIGKILL of the server alone loses nothing the kernel has
    own_redis.restart()
    assert [len(await log_of(queue, rid)) for rid in got] == [2, 2, 2]
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await commands.aclose()
    await blocking.aclose()


async def test_a_script_is_sent_again_after_the_server_forgot_it(
    queue: RequestQueue, make_worker: MakeWorker, redis: Redis
) -> None:
    worker = await make_worker()
    await submit(queue)
    await redis.script_flush()
    acquired = await take_one(worker)
    await redis.script_flush()
    assert await say(worker, acquired, 0, 1) == [OK, OK]


async def test_rd_36_a_small_pool_makes_callers_wait_not_fail(queue: RequestQueue, redis_url: str) -> None:
    request = await submit(queue)
    client = command_client(redis_url, max_connections=4)
    small = RequestQueue(client)
    states = await asyncio.gather(*(small.state(request.rid) for _ in range(200)))
    assert all(state is not None and state.request == request for state in states)
    await client.aclose()


async def test_rd_36_an_exhausted_pool_is_redis_down(own_redis: RedisServer) -> None:
    client = command_client(own_redis.url, max_connections=1, wait_s=0.05)
    connection = await client.connection_pool.get_connection()
    with pytest.raises(REDIS_DOWN) as exhausted:
        await client.ping()
    assert isinstance(exhausted.value, RedisConnectionError)
    await client.connection_pool.release(connection)
    await client.aclose()


async def test_a_full_redis_is_redis_down_and_nothing_is_half_done(own_redis: RedisServer) -> None:
    client, blocking = command_client(own_redis.url), blocking_client(own_redis.url)
    queue = RequestQueue(client)
    worker = ClaimQueue(client, blocking, Consumer("w", "tiny"))
    await worker.ensure_group()
    request = await submit(queue)
    acquired = await take_one(worker)
    await client.config_set("maxmemory", 1)
    for call in (
        lambda: queue.submit(make_request(), max_waiting=9, max_waiting_tokens=99),
        lambda: worker.commit([Commit(acquired.claim, 0, token_record(0))]),
        lambda: queue.restore(make_request(), []),
    ):
        with pytest.raises(REDIS_DOWN):
            await call()
    assert await log_of(queue, request.rid) == []
    await client.config_set("maxmemory", 0)
    assert await say(worker, acquired, 0) == [OK]
    await client.aclose()
    await blocking.aclose()
