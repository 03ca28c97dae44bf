"""The worker process put together: Redis on the asyncio thread, the engine on its own, signals, drain, ways to end.

In: settings. Out: an exit code. Everything is made and wired here and nowhere else.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis

from engine_worker.control import listen
from engine_worker.engine_loop import EngineLoop
from engine_worker.engines import load_engine
from engine_worker.errors import LoadError
from engine_worker.faults import Faults
from engine_worker.heartbeat import Heartbeat, Offer
from engine_worker.intake import Intake
from engine_worker.lease import Lease
from engine_worker.neighbours import others_serve, release_predecessor
from engine_worker.outbox import Outbox
from engine_worker.process import cancel_all, catch_signals, close_quietly, in_thread, until, wait_for_redis
from engine_worker.settings import WorkerSettings
from engine_worker.validation import ServedModel
from engine_worker.waiting import REDIS_TROUBLE, Backoff
from engine_worker.warm import WarmEngine
from shared.channel import Subscriber
from shared.claims import ClaimQueue, Consumer
from shared.connections import UnfitServer, blocking_client, command_client
from shared.held import HeldRequests
from shared.messages import WorkerCard
from shared.prefixes import PrefixMemory
from shared.registry import list_models

__all__ = ["run_worker"]

EXIT_OK = 0
EXIT_UNUSABLE = 2
"""Model, settings or Redis server cannot be used: starting again will not help."""
EXIT_ENGINE_FAILED = 70
EXIT_ENGINE_HUNG = 71

_HUNG_AFTER_LIMITS = 5
"""Leases stop after one step limit; a step that lasts this many more is given up with the process."""
_WATCH_S = 0.5
_FAILURE_S = 2.0
"""For handing back before the process of a broken engine ends."""

log = structlog.get_logger(__name__)


async def run_worker(settings: WorkerSettings) -> int:
    """Serves until a signal or a failure; returns the exit code. Signals are this function's while it runs."""
    stop = catch_signals()
    async with AsyncExitStack() as stack:
        try:
            worker = await _start(settings, stop, stack)
        except (UnfitServer, LoadError, ValueError) as error:
            log.error("cannot start", reason=str(error))
            return EXIT_UNUSABLE
        return EXIT_OK if worker is None else await worker.run(stop)


async def _start(settings: WorkerSettings, stop: asyncio.Event, stack: AsyncExitStack) -> Worker | None:
    """A worker with a warm engine; None when `stop` came first. What it opens is closed by `stack`.

    Raises UnfitServer, LoadError or ValueError, each with a message for the operator.
    """
    faults = Faults(settings.fault)
    redis = command_client(settings.redis_url)
    stack.push_async_callback(close_quietly, redis)
    if not await until(stop, wait_for_redis(redis)):
        return None
    if "worker_id" in settings.model_fields_set:
        await release_predecessor(redis, settings)
    card = WorkerCard(
        worker_id=settings.worker_id,
        model=settings.served_model_name or settings.model,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=int(time.time()),
        max_num_seqs=settings.max_num_seqs,
    )
    heartbeat = Heartbeat(redis, card)
    stack.callback(heartbeat.stop)
    heartbeat.start()
    yields = await others_serve(redis, settings)
    warm = await until(stop, in_thread(lambda: load_engine(settings), yields=yields))
    if warm is None:
        return None
    gc.freeze()  # all that was loaded stays: a collection that looked at it again would hold up a step
    gc.enable()
    return Worker(settings, redis, stack, heartbeat, warm, faults)


class Worker:
    """A warm engine and everything around it. Made in the asyncio thread; used once."""

    def __init__(
        self,
        settings: WorkerSettings,
        redis: Redis,
        stack: AsyncExitStack,
        heartbeat: Heartbeat,
        warm: WarmEngine,
        faults: Faults,
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._heartbeat = heartbeat
        self._warm = warm
        held = HeldRequests()  # of the whole process: a suspect is alone in it, whatever its shard
        self._queues = {shard: self._queue(shard, held, stack) for shard in range(settings.shards)}
        self._subscriber = Subscriber(settings.redis_url)
        stack.push_async_callback(self._subscriber.close)
        served = ServedModel(
            name=warm.card.name,
            token_bytes=warm.token_bytes,
            max_request_tokens=warm.engine.max_request_tokens(),
            eos_token_ids=warm.card.eos_token_ids,
            grammars=warm.grammars,
        )
        freed = asyncio.Event()
        slots = settings.max_num_seqs
        self._engine = EngineLoop(warm.engine, faults)
        cache_tokens = warm.engine.stats().blocks_total * settings.block_size
        self._prefixes = PrefixMemory(cache_tokens) if settings.enable_prefix_caching else None
        self.outbox = Outbox(
            self._queues, self._engine, freed=freed, backlog_limit=max(4096, 64 * slots), prefixes=self._prefixes
        )
        self._lease = Lease(
            self._queues,
            self.outbox,
            self._engine,
            lease_ms=settings.lease_ms,
            step_limit_ms=settings.step_limit_ms,
        )
        self._intake = Intake(
            self._queues,
            self.outbox,
            self._engine,
            self._lease,
            served,
            freed=freed,
            max_num_seqs=slots,
            lease_ms=settings.lease_ms,
            prefixes=self._prefixes,
        )

    async def run(self, stop: asyncio.Event) -> int:
        """Serves until `stop` is set (drain) or something breaks; returns the exit code."""
        await self._offer_model()
        self._engine.start(self.outbox.deliver)
        taking = self._spawn(self._intake.read, self._intake.reclaim, self._intake.clean, self._listen)
        keeping = [asyncio.create_task(self._lease.run(), name="lease")]
        writing = self._spawn(self.outbox.run)
        log.info("worker ready", worker_id=self._settings.worker_id, model=self._warm.card.name)
        watch = asyncio.create_task(self._watch(), name="watch")
        watched = [*taking, *keeping, *writing, self._heartbeat.start(), watch]
        stopping = asyncio.create_task(stop.wait(), name="stop")
        ends: list[asyncio.Future[Any]] = [*watched, stopping, self._engine.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        code = self._diagnose(watched, hung=watch.done())
        try:
            await self._leave(code, taking, keeping)
        finally:
            await cancel_all([*watched])
        return code

    def _queue(self, shard: int, held: HeldRequests, stack: AsyncExitStack) -> ClaimQueue:
        settings = self._settings
        blocking = blocking_client(settings.redis_url)
        stack.push_async_callback(close_quietly, blocking)
        consumer = Consumer(
            settings.worker_id,
            self._warm.card.name,
            shard,
            lease_ms=settings.lease_ms,
            max_tries=settings.max_tries,
            retention_ms=settings.retention_ms,
        )
        return ClaimQueue(self._redis, blocking, consumer, held)

    def _spawn(self, *loops: Callable[[int], Coroutine[Any, Any, None]]) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(loop(shard), name=loop.__name__) for loop in loops for shard in self._queues]

    async def _listen(self, shard: int) -> None:
        await listen(self._subscriber, shard, self._intake, self._lease)

    async def _offer_model(self) -> None:
        """Groups first, then the card. A model known already keeps its `created`, whichever worker came first."""
        backoff = Backoff(0.1, 2.0)
        card = self._warm.card
        while True:
            try:
                for queue in self._queues.values():
                    await queue.ensure_group()
                known = (await list_models(self._redis)).get(card.name)
                break
            except REDIS_TROUBLE as error:
                log.warning("Redis not reachable", reason=str(error))
                await asyncio.sleep(backoff.next())
        if known is not None:
            card = msgspec.structs.replace(card, created=known.created)
            if known.fingerprint != card.fingerprint:
                log.warning("another worker serves different weights under this name", model=card.name)
        offer = Offer(card, self._warm.tokenizer_json, self._warm.chat_template)
        self._heartbeat.ready(offer, self._fill_card, self._prefixes)

    def _fill_card(self, card: WorkerCard) -> WorkerCard:
        stats = self._warm.engine.stats()
        counters = Counter(stats.counters)
        counters.update(self.outbox.counters)
        counters.update(self._intake.counters)
        return msgspec.structs.replace(
            card,
            running=stats.running,
            waiting=stats.waiting,
            kv_blocks_used=stats.blocks_used,
            kv_blocks_total=stats.blocks_total,
            kv_cache_bytes=self._warm.kv_cache_bytes,
            steps=stats.steps,
            last_step_age_ms=int(self._engine.step_age * 1000),
            counters={name: float(value) for name, value in counters.items()},
            histograms={
                "commit_seconds": self.outbox.commit_seconds.values(),
                "queue_age_seconds": self._intake.queue_age_seconds.values(),
            },
        )

    async def _watch(self) -> None:
        """Returns when a step is past hope."""
        limit = _HUNG_AFTER_LIMITS * self._settings.step_limit_ms / 1000
        while self._engine.step_age < limit:  # noqa: ASYNC110 - an age sets no event
            await asyncio.sleep(_WATCH_S)

    def _diagnose(self, watched: list[asyncio.Task[None]], *, hung: bool) -> int:
        """Says why the worker leaves; the exit code for it."""
        if self._engine.failed.done():
            log.error("engine failed, worker ends", exc_info=self._engine.failed.result())
            return EXIT_ENGINE_FAILED
        for task in watched:
            if task.done() and (error := task.exception()) is not None:
                log.error("worker ends", task=task.get_name(), exc_info=error)
                return EXIT_ENGINE_FAILED
        if hung:
            log.error("engine step hangs, worker ends", step_age_s=round(self._engine.step_age, 1))
            return EXIT_ENGINE_HUNG
        log.info("draining", requests=len(self.outbox.jobs))
        return EXIT_OK

    async def _leave(self, code: int, taking: list[asyncio.Task[None]], keeping: list[asyncio.Task[None]]) -> None:
        """Stops intake and steps, commits what is computed, hands back the rest. Bounded in time whatever happens."""
        limit = self._settings.drain_timeout_ms / 1000 if code == EXIT_OK else _FAILURE_S
        self._heartbeat.draining()
        try:
            async with asyncio.timeout(limit):
                await cancel_all(taking)
                if not await self._engine.stop(limit / 2):
                    log.warning("left without the running step", step_age_s=round(self._engine.step_age, 1))
                await self.outbox.flush()
                await cancel_all(keeping)
                await self._hand_back(all_of_them=code == EXIT_OK)
                await self._heartbeat.withdraw()
        except REDIS_TROUBLE as error:  # the time limit is one of them
            # Nothing is lost: leases run out and other workers continue from the log.
            log.warning("left without handing everything back", reason=str(error) or "time limit")

    async def _hand_back(self, *, all_of_them: bool) -> None:
        """After a failure those that committed nothing since they were acquired are kept: one of them may be the cause,
        and a hand-back would clear it of the charge. Their leases run out."""
        await self._intake.hand_back_unplaced()
        for shard, queue in self._queues.items():
            claims = [job.claim for job in self.outbox.jobs_of(shard) if all_of_them or job.progressed]
            await queue.hand_back(claims)
            await queue.leave()
            log.info("handed back", shard=shard, requests=len(claims))
