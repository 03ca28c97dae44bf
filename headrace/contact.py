"""What the supervisor says to Redis and to its pod: are you there, are you ready, this worker is gone.

Apart from serve.py because of the libraries that it takes: they are imported once the programs are on their way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx
import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError

from shared.connections import REDIS_DOWN, command_client
from shared.pending import release_consumer

__all__ = ["ping", "release", "wait_ready"]

POLL_S = 0.05


async def ping(url: str, deadline_s: float) -> str | None:
    """Waits until the server answers. None when it did, else the last thing that stood in the way."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    client = redis_asyncio.from_url(url, socket_connect_timeout=2, socket_timeout=2)
    try:
        while True:
            try:
                await client.ping()
            except (RedisError, OSError) as error:
                if loop.time() >= end:
                    return str(error) or type(error).__name__
            else:
                return None
            await asyncio.sleep(POLL_S)
    finally:
        await client.aclose()


async def wait_ready(url: str, headers: Mapping[str, str]) -> str:
    """Waits, for as long as it takes, until the pod at `url` can answer a request; returns the model's name."""
    async with httpx.AsyncClient(base_url=url, headers=dict(headers), timeout=5, trust_env=False) as client:
        while True:
            try:
                if (await client.get("/ready")).status_code == httpx.codes.OK:
                    models = (await client.get("/v1/models")).raise_for_status().json()["data"]
                    if models:
                        return str(models[0]["id"])
            except httpx.TransportError:
                pass  # not listening yet
            await asyncio.sleep(POLL_S)


async def release(url: str, worker_id: str, model: str, shards: int) -> str | None:
    """Lets others take over at once what a worker ran that is surely gone. None when that is done, else why not."""
    redis = command_client(url)
    try:
        for shard in range(shards):
            await release_consumer(redis, worker_id, model, shard)
    except REDIS_DOWN as error:
        return str(error)
    finally:
        await redis.aclose()
    return None
