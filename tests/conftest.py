"""Fixtures for every test: a real Redis of the test run's own, empty at the start of each test, checked at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from shared.connections import command_client
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def _shared_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_server(_shared_redis: RedisServer) -> Iterator[RedisServer]:
    """The run's Redis, flushed before the test; afterwards every key left must be a queue stream or have a TTL."""
    _shared_redis.check_identity()
    client = _shared_redis.client()
    try:
        client.flushall()
        client.script_flush()
        yield _shared_redis
        assert_only_queues_without_ttl(_shared_redis)
    finally:
        client.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A command client of the run's Redis."""
    client = command_client(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server of this test alone, with AOF, to kill and restart."""
    with RedisServer(aof=True) as server:
        yield server


def assert_only_queues_without_ttl(server: RedisServer) -> None:
    client = server.client()
    try:
        forever = [key for key in client.scan_iter(count=1000) if client.pttl(key) == -1]
    finally:
        client.close()
    assert [key for key in forever if b":queue:" not in key] == []
