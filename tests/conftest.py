"""Fixtures for every test: a real Redis of the test run's own, empty at the start of each test, checked at its end.

After a failure what it stood on is made anew, and the run's last lines say why, see tests/support/{renewed,reasons}.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator

import pytest
from redis.asyncio import Redis

from shared.connections import command_client
from tests.support.reasons import PROCESS_LOGS, Reasons
from tests.support.redis_server import RedisServer
from tests.support.renewed import spoil_what_failed
from tests.support.stack import Process, Stack


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reasons())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the processes wrote, also those that outlive the test; nobody else gets them."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            process = getattr(value, "stack", value)
            if isinstance(process, Stack):
                report.sections.append((PROCESS_LOGS, process.logs()))
            elif isinstance(process, Process):
                report.sections.append((PROCESS_LOGS, process.log()))
        spoil_what_failed(item)
    return report


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
