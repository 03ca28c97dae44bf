"""A queue and any number of workers on the test's Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.claims import ClaimQueue, Consumer
from shared.connections import blocking_client, command_client
from shared.held import HeldRequests
from shared.queue import RequestQueue
from tests.support.queue_steps import MakeWorker


@pytest.fixture
def queue(redis: Redis) -> RequestQueue:
    return RequestQueue(redis)


@pytest.fixture
async def make_worker(redis_url: str) -> AsyncIterator[MakeWorker]:
    """`await make_worker("w1", lease_ms=50)`: a ClaimQueue with clients of its own, as a worker process has."""
    clients: list[Redis] = []

    async def make(consumer: str = "w1", held: HeldRequests | None = None, **terms: Any) -> ClaimQueue:
        commands, blocking = command_client(redis_url, max_connections=4), blocking_client(redis_url)
        clients.extend([commands, blocking])
        worker = ClaimQueue(commands, blocking, Consumer(consumer, "tiny", **terms), held)
        await worker.ensure_group()
        return worker

    yield make
    for client in clients:
        await client.aclose()
