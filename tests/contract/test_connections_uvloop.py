"""Connections on the event loop that pods run: what uvloop says differently must mean the same."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from shared.connections import REDIS_DOWN, blocking_client, command_client


def on_uvloop(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def close_under(connection: Any) -> None:
    """The transport is closed, as by a reset, and the connection object does not know it yet."""
    transport = connection._writer.transport
    transport.abort()
    for _ in range(3):  # the loop closes the handle in its next rounds
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        transport.writelines([b"x"])


def test_rd_29_a_write_to_a_closed_connection_is_redis_down(redis_url: str) -> None:
    async def work() -> None:
        client = blocking_client(redis_url)  # without retries
        connection = await client.connection_pool.get_connection()
        await close_under(connection)
        with pytest.raises(REDIS_DOWN):
            await connection.send_command("PING", check_health=False)
        await client.connection_pool.release(connection)
        assert await client.ping()
        await client.aclose()

    on_uvloop(work())


def test_rd_29_a_command_on_a_closed_connection_is_sent_again(redis_url: str) -> None:
    async def work() -> None:
        client = command_client(redis_url)
        connection = await client.connection_pool.get_connection()
        await client.connection_pool.release(connection)
        await close_under(connection)
        assert await client.ping()
        await client.aclose()

    on_uvloop(work())
