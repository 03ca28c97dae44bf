"""What this pod knows of models and workers: a snapshot of Redis's registry, refreshed every second by one task.

In: cards and blobs from shared/registry.py. Out: `Snapshot` for probes and metrics, `ServedModel` for requests.
Probes never touch Redis; requests share one refresh when they ask for a model that the snapshot does not have.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from redis.asyncio import Redis

from api_service.prepare.model import ServedModel, Vocabulary
from api_service.reachability import UNREACHABLE, Reachability
from shared.connections import REDIS_DOWN
from shared.errors import HeadraceError, ModelNotFound, Overloaded, RedisUnavailable
from shared.messages import ModelCard, WorkerCard
from shared.queue import Depth, RequestQueue, TenantUse
from shared.registry import list_models, list_workers, load_blob, load_prefixes

__all__ = ["STEP_LIMIT_MS", "RegistryView", "Snapshot", "pause_s"]

REFRESH_S = 1.0
EAGER_REFRESH_S = 0.2
"""While no worker serves: whoever started the first one waits for it."""
LOADING_REFRESH_S = 0.05
"""While one is about to: it loads, or is ready and its model not known yet."""
MISS_REFRESH_S = 0.2
"""Unknown model names make at most this many refreshes a second, however many clients send them."""
KEEP_S = 3.0
"""A model stays this long after its card was last seen, so that a flushed Redis is no reason to refuse requests."""
REMEMBER_S = 600.0
"""How long a model without workers is "unavailable now" (503) rather than unknown (404)."""
STEP_LIMIT_MS = 30_000
"""A worker with running requests and no engine step for so long is not counted as ready."""
_MAX_VOCABULARIES = 16
_MAX_TENANTS = 40

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Snapshot:
    models: dict[str, ModelCard] = field(default_factory=dict)
    workers: tuple[WorkerCard, ...] = ()
    depths: dict[str, Depth] = field(default_factory=dict)
    redis_ok: bool = False
    tenants: dict[str, list[TenantUse]] = field(default_factory=dict)
    """By model: the shares that were served most or are served next; a few, however many there are."""
    prefixes: dict[str, frozenset[bytes]] = field(default_factory=dict)
    """Fingerprints of what each worker has cached, where a model has several."""

    def serving(self) -> list[WorkerCard]:
        """Workers that can take a request now: warm, not draining, and stepping if they have work."""
        return [card for card in self.workers if card.state == "ready" and not _hangs(card)]


def _hangs(card: WorkerCard) -> bool:
    return card.running > 0 and card.last_step_age_ms > STEP_LIMIT_MS


def pause_s(view: Snapshot) -> float:
    """Until the next refresh, in seconds: the less can be served now, the sooner."""
    serving = view.serving()
    if any(card.model in view.models for card in serving):
        return REFRESH_S
    coming = serving or [card for card in view.workers if card.state == "loading"]
    return LOADING_REFRESH_S if coming else EAGER_REFRESH_S


def _seen_by_request(task: asyncio.Task[Vocabulary]) -> None:
    """A failure is told by the next request, which tries again; asyncio need not report it as forgotten."""
    if not task.cancelled():
        task.exception()


class RegistryView:
    """Owns the refresh task and the cache of tokenizers. start() before use, close() at the end."""

    def __init__(
        self, redis: Redis, queue: RequestQueue, reachability: Reachability, shards: int, tool_parser: str = "auto"
    ) -> None:
        self._redis = redis
        self._queue = queue
        self._reachability = reachability
        self._shards = shards
        self._tool_parser = tool_parser
        self._seen: dict[str, tuple[float, ModelCard]] = {}
        self._vocabularies: dict[str, asyncio.Task[Vocabulary]] = {}
        self._templates: dict[str, str] = {"": ""}
        self._models: dict[str, ServedModel] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = float("-inf")
        self._loop_task: asyncio.Task[None] | None = None
        self.snapshot = Snapshot()

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._keep_fresh(), name="registry view")

    async def close(self) -> None:
        tasks = [task for task in (self._loop_task, self._refreshing, *self._vocabularies.values()) if task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    async def served(self, name: str) -> ServedModel:
        """The model of this name, tokenizer loaded. Raises ModelNotFound (naming those that are served), Overloaded
        when its workers are gone for the moment, RedisUnavailable."""
        card = self.snapshot.models.get(name)
        if card is None:
            await self.refresh()
            card = self.snapshot.models.get(name)
        if card is None:
            raise self.unknown(name)
        model = self._models.get(name)
        if model is None or model.card != card:
            template = await self._template(card.chat_template)
            model = self._models[name] = ServedModel(
                card, await self.vocabulary(card.tokenizer), template, self._tool_parser
            )
        return model

    async def vocabulary(self, sha: str) -> Vocabulary:
        """The tokenizer with this content hash, loaded once. Raises ModelNotFound while Redis does not have it."""
        return await self._reachability.answer(self._loading(sha))

    def _loading(self, sha: str) -> asyncio.Task[Vocabulary]:
        task = self._vocabularies.get(sha)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._load_vocabulary(sha), name="load tokenizer")
            self._vocabularies[sha] = task
            while len(self._vocabularies) > _MAX_VOCABULARIES:
                self._vocabularies.pop(next(iter(self._vocabularies)))
        return task

    def _load_ahead(self, cards: Collection[ModelCard]) -> None:
        """Tokenizers of models that were just seen, so that the first request does not wait for them."""
        if len(cards) <= _MAX_VOCABULARIES:
            for sha in {card.tokenizer for card in cards} - self._vocabularies.keys():
                self._loading(sha).add_done_callback(_seen_by_request)

    async def refresh(self) -> None:
        """A snapshot not older than MISS_REFRESH_S. The reads run in a task of their own, whoever stops waiting.

        Raises RedisUnavailable while Redis is away.
        """
        if self._refreshing is None and time.monotonic() - self._refreshed_at < MISS_REFRESH_S:
            return
        await self._reachability.answer(self._refresh_task())

    def _refresh_task(self) -> asyncio.Task[None]:
        """The refresh under way, or a new one."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh(), name="registry refresh")
            self._refreshing.add_done_callback(self._refresh_done)
        return self._refreshing

    def _refresh_done(self, _: object) -> None:
        self._refreshing = None

    def unknown(self, name: str) -> HeadraceError:
        """Why there is no model of this name now."""
        if not self.snapshot.redis_ok:
            return RedisUnavailable(UNREACHABLE, retry_after=1.0)
        if name in self._seen:
            return Overloaded(f"No worker serves the model '{name[:200]}' at the moment.", retry_after=5.0)
        served = ", ".join(f"'{known}'" for known in sorted(self.snapshot.models)[:20]) or "none"
        return ModelNotFound(f"The model '{name[:200]}' does not exist. Served models: {served}.", param="model")

    async def _template(self, sha: str) -> str:
        if sha not in self._templates:
            self._templates[sha] = (await self._detached(self._blob(sha))).decode()
        return self._templates[sha]

    async def _load_vocabulary(self, sha: str) -> Vocabulary:
        blob = await self._blob(sha)
        return await asyncio.to_thread(Vocabulary, blob)

    async def _blob(self, sha: str) -> bytes:
        try:
            return await load_blob(self._redis, sha)
        except REDIS_DOWN as error:
            raise RedisUnavailable(UNREACHABLE, retry_after=1.0) from error

    async def _detached(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        """Finishes the read even when the handler that wants it is cancelled: half-read connections are poison."""
        return await self._reachability.answer(asyncio.create_task(work))

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.wait([self._refresh_task()])
            await asyncio.sleep(pause_s(self.snapshot))

    async def _refresh(self) -> None:
        try:
            models = await list_models(self._redis)
            workers = await list_workers(self._redis)
            now = time.monotonic()
            self._seen |= {name: (now, card) for name, card in models.items()}
            self._seen = {name: known for name, known in self._seen.items() if now - known[0] < REMEMBER_S}
            self._models = {name: model for name, model in self._models.items() if name in self._seen}
            listed = {name: card for name, (at, card) in self._seen.items() if now - at < KEEP_S}
            depths = {name: await self._depth(name) for name in listed}
            prefixes = await self._prefixes(workers)
            tenants = {name: await self._tenants(name) for name in listed}
        except REDIS_DOWN as error:
            if self.snapshot.redis_ok:
                log.warning("redis cannot be reached", error=str(error))
            self.snapshot = Snapshot(self.snapshot.models, (), {}, redis_ok=False)
        else:
            self.snapshot = Snapshot(listed, tuple(workers), depths, redis_ok=True, tenants=tenants, prefixes=prefixes)
            self._load_ahead(listed.values())
        self._refreshed_at = time.monotonic()

    async def _prefixes(self, workers: Sequence[WorkerCard]) -> dict[str, frozenset[bytes]]:
        alike = Counter(card.model for card in workers)
        wanted = [card.worker_id for card in workers if alike[card.model] > 1]
        return await load_prefixes(self._redis, wanted) if wanted else {}

    async def _tenants(self, model: str) -> list[TenantUse]:
        found = [use for shard in range(self._shards) for use in await self._queue.tenants(model, shard)]
        sums: dict[str, TenantUse] = {}
        for use in found:
            before = sums.get(use.share, TenantUse(use.share, 0, 0))
            sums[use.share] = TenantUse(
                use.share, before.served_tokens + use.served_tokens, before.waiting + use.waiting
            )
        return sorted(sums.values(), key=lambda use: -use.served_tokens)[:_MAX_TENANTS]

    async def _depth(self, model: str) -> Depth:
        parts = [await self._queue.depth(model, shard) for shard in range(self._shards)]
        return Depth(
            sum(part.waiting for part in parts),
            sum(part.running for part in parts),
            sum(part.waiting_tokens for part in parts),
            waiting_batch=sum(part.waiting_batch for part in parts),
        )
