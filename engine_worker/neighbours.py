"""What a worker that starts owes the others: what its predecessor ran, and room for those that took over.

In: the registry of models and workers. Out: released requests, and whether loading should give way.
"""

from __future__ import annotations

import structlog
from redis.asyncio import Redis

from engine_worker.settings import WorkerSettings
from engine_worker.waiting import REDIS_TROUBLE
from shared.pending import release_consumer
from shared.registry import list_models, list_workers

__all__ = ["others_serve", "release_predecessor"]

log = structlog.get_logger(__name__)


async def release_predecessor(redis: Redis, settings: WorkerSettings) -> None:
    """A process that was given its name knows that the last one of this name is dead: what that one ran need not wait
    for its lease, nor for this worker to have loaded its model."""
    try:
        for model in await list_models(redis):
            for shard in range(settings.shards):
                if released := await release_consumer(redis, settings.worker_id, model, shard):
                    log.info("released what the last worker of this name ran", model=model, requests=released)
    except REDIS_TROUBLE as error:
        log.warning("the last worker's requests wait for their leases", reason=str(error))


async def others_serve(redis: Redis, settings: WorkerSettings) -> bool:
    """Whether somebody has work that loading may slow down: a worker that takes over what another one ran."""
    try:
        workers = await list_workers(redis)
    except REDIS_TROUBLE:
        return False
    return any(card.state == "ready" and card.worker_id != settings.worker_id for card in workers)
