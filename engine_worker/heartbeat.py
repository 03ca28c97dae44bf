"""Tells the registry every second that this worker lives, what it serves and how busy it is.

In: a function that reads the engine's numbers. Out: WorkerCard and, once the engine is warm, ModelCard with its blobs,
written again whenever Redis has lost them. A worker whose heartbeat stops disappears by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog
from redis.asyncio import Redis

from engine_worker.waiting import REDIS_TROUBLE, wait_for_event
from shared.messages import ModelCard, WorkerCard
from shared.prefixes import PrefixMemory
from shared.registry import heartbeat, publish_model, publish_prefixes, withdraw_worker

__all__ = ["Heartbeat", "Offer"]

_INTERVAL_S = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """The model this worker offers, and the files its card names."""

    card: ModelCard
    tokenizer_json: bytes
    chat_template: str


class Heartbeat:
    """`card` is the part that never changes; the numbers of the moment come with `ready`, once there is an engine."""

    def __init__(self, redis: Redis, card: WorkerCard) -> None:
        self._redis = redis
        self._card = card
        self._state: Literal["loading", "ready", "draining"] = "loading"
        self._offer: Offer | None = None
        self._read: Callable[[WorkerCard], WorkerCard] = _unchanged
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._rate = _Rate()
        self._prefixes: PrefixMemory | None = None

    def ready(
        self, offer: Offer, read: Callable[[WorkerCard], WorkerCard], prefixes: PrefixMemory | None = None
    ) -> None:
        """The engine is warm: from now on the model is offered. `prefixes`: what its cache holds; None: no cache."""
        self._prefixes = prefixes
        self._card = msgspec.structs.replace(self._card, model=offer.card.name)
        self._offer, self._read, self._state = offer, read, "ready"
        self._changed.set()

    def draining(self) -> None:
        """The model is no longer kept alive by this worker."""
        self._state = "draining"
        self._changed.set()

    def start(self) -> asyncio.Task[None]:
        """The task that beats; it ends by `stop` or `withdraw`, or with what broke it. Harmless to call again."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="heartbeat")
        return self._task

    def stop(self) -> None:
        """Beats no more; the card runs out by itself."""
        self.start().cancel()

    async def withdraw(self) -> None:
        """Beats no more and takes the card back at once."""
        self.stop()
        await asyncio.wait([self.start()])
        await withdraw_worker(self._redis, self._card.worker_id)

    async def _run(self) -> None:
        reachable = True
        while True:
            self._changed.clear()
            try:
                await self._beat()
                reachable = True
            except REDIS_TROUBLE as error:
                if reachable:
                    log.warning("heartbeat not stored", reason=str(error))
                reachable = False
            await wait_for_event(self._changed, _INTERVAL_S)

    async def _beat(self) -> None:
        card = self._read(msgspec.structs.replace(self._card, state=self._state))
        rate = self._rate.update(card.counters.get("generation_tokens", 0.0))
        card = msgspec.structs.replace(card, tokens_per_s=rate)
        offer = self._offer if self._state == "ready" else None
        if not await heartbeat(self._redis, card, offer.card if offer else None) and offer is not None:
            await publish_model(self._redis, offer.card, offer.tokenizer_json, offer.chat_template)
            log.info("model published", model=offer.card.name)
        if self._prefixes is not None and offer is not None:
            await publish_prefixes(self._redis, card.worker_id, self._prefixes.packed())


class _Rate:
    """Tokens per second between two beats."""

    def __init__(self) -> None:
        self._total = 0.0
        self._at = time.monotonic()

    def update(self, total: float) -> float:
        now = time.monotonic()
        rate = (total - self._total) / max(now - self._at, 1e-3)
        self._total, self._at = total, now
        return round(max(rate, 0.0), 1)


def _unchanged(card: WorkerCard) -> WorkerCard:
    return card
