"""Whole workers inside the test's process: a real engine on the tiny model, a real Redis, no subprocess.

In: a Redis URL, a loaded model, settings by name. Out: a worker that serves until the `async with` block ends, whose
engine must then have every block free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from engine_worker.engine import Engine
from engine_worker.faults import Faults
from engine_worker.heartbeat import Heartbeat
from engine_worker.loading import make_engine
from engine_worker.models.base import LoadedModel
from engine_worker.settings import WorkerSettings
from engine_worker.worker import Worker
from shared.claims import ClaimQueue, Consumer
from shared.connections import blocking_client, command_client
from shared.messages import Delta, End, GenerateRequest, Record, WorkerCard, decode_record
from shared.queue import RequestQueue
from tests.support.wait import eventually

__all__ = [
    "Answer",
    "RunningWorker",
    "ask",
    "finished",
    "other_worker",
    "read_answer",
    "running_worker",
    "submit",
    "until_logged",
]


@dataclass
class RunningWorker:
    worker: Worker
    engine: Engine
    settings: WorkerSettings
    task: asyncio.Task[int]
    _stop: asyncio.Event

    async def stop(self) -> int:
        """Drains; the exit code."""
        self._stop.set()
        return await self.task


@asynccontextmanager
async def other_worker(redis_url: str, **changes: int) -> AsyncIterator[ClaimQueue]:
    """The queue side of a second worker, without an engine."""
    redis, blocking = command_client(redis_url), blocking_client(redis_url)
    queue = ClaimQueue(redis, blocking, Consumer("other", "tiny", **changes))
    await queue.ensure_group()
    try:
        yield queue
    finally:
        await redis.aclose()
        await blocking.aclose()


@asynccontextmanager
async def running_worker(
    redis_url: str, loaded: LoadedModel, *, prepare: Callable[[Engine], None] | None = None, **changes: Any
) -> AsyncIterator[RunningWorker]:
    """A worker of model "tiny"; `changes` are settings, `prepare` may tamper with the engine before it starts."""
    fields: dict[str, Any] = {"served_model_name": "tiny", "kv_cache_memory": 1 << 22, "max_num_seqs": 8}
    settings = WorkerSettings(**(fields | changes), redis_url=redis_url)
    warm = make_engine(settings, loaded)
    if prepare is not None:
        prepare(warm.engine)
    async with AsyncExitStack() as stack:
        redis = command_client(redis_url)
        stack.push_async_callback(redis.aclose)
        heartbeat = Heartbeat(redis, WorkerCard(worker_id=settings.worker_id, model="tiny"))
        heartbeat.start()
        stack.callback(heartbeat.stop)
        worker = Worker(settings, redis, stack, heartbeat, warm, Faults(settings.fault))
        stop = asyncio.Event()
        task = asyncio.create_task(worker.run(stop))
        running = RunningWorker(worker, warm.engine, settings, task, stop)
        try:
            yield running
        finally:
            await running.stop()


@dataclass(frozen=True)
class Answer:
    """What a request's log says."""

    records: list[Record]
    payloads: list[bytes]

    @property
    def end(self) -> End:
        ends = [record.end for record in self.records if record.end is not None]
        assert len(ends) == 1, f"{len(ends)} terminal records"
        assert self.records[-1].end is ends[0]
        return ends[0]

    def deltas(self, index: int = 0) -> list[Delta]:
        return [delta for record in self.records for delta in record.deltas if delta.index == index]

    def tokens(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas(index) for token in delta.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(index))

    def last(self, index: int = 0) -> Delta:
        """The delta that ended the choice; there must be exactly one."""
        (delta,) = [delta for delta in self.deltas(index) if delta.finish_reason is not None]
        return delta


async def submit(redis: Redis, request: GenerateRequest) -> None:
    await RequestQueue(redis).submit(request, max_waiting=1000, max_waiting_tokens=1_000_000)


async def read_answer(redis: Redis, rid: str) -> Answer:
    """The log so far; seq must be 0, 1, 2, …"""
    payloads = await RequestQueue(redis).read_log(rid)
    records = [decode_record(payload) for payload in payloads]
    assert [record.seq for record in records] == list(range(len(records)))
    return Answer(records, payloads)


async def finished(redis: Redis, rid: str, timeout: float = 20.0) -> Answer:
    """Waits for the terminal record."""

    async def is_done() -> bool:
        state = await RequestQueue(redis).state(rid)
        return state is not None and state.state == "done"

    await eventually(is_done, timeout, what=f"request {rid} to end")
    return await read_answer(redis, rid)


async def ask(redis: Redis, request: GenerateRequest) -> Answer:
    """Submits and waits for the end."""
    await submit(redis, request)
    return await finished(redis, request.rid)


async def until_logged(redis: Redis, rid: str, records: int) -> Answer:
    """Waits until the log has at least so many records; the log then."""

    async def enough() -> Answer | None:
        answer = await read_answer(redis, rid)
        return answer if len(answer.records) >= records else None

    answer = await eventually(enough, what=f"{records} records of {rid}")
    assert answer is not None
    return answer
