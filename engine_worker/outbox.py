"""The only one that writes to requests' logs: engine events in, records out, one script call per shard and round.

Owns the jobs from their admission to their terminal record. While a commit is in flight (or Redis is away), what the
engine goes on to say is merged into one record per request; past a limit the engine is paused: memory stays bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import structlog

from engine_worker.choice import Choice
from engine_worker.jobs import Job
from engine_worker.request import TokenEvent
from engine_worker.waiting import REDIS_TROUBLE, Backoff
from shared.claims import ClaimQueue, Commit, CommitReply, ReplyKind
from shared.histogram import SecondsHistogram
from shared.keys import shard_of
from shared.prefixes import PrefixMemory

__all__ = ["Outbox"]

_MAX_BATCH = 512
"""Records in one script call, so that a long backlog does not block Redis."""

log = structlog.get_logger(__name__)


class EngineControl(Protocol):
    """What the outbox says to the engine."""

    def abort(self, request_id: str) -> None: ...

    def pause(self, paused: bool) -> None: ...


class Outbox:
    """Jobs of this worker, and the loops that commit their records.

    `freed` is set whenever choices have ended, so that intake can look for more. `backlog_limit` is in tokens that are
    not yet in a record. `prefixes` learns what has run.
    """

    def __init__(
        self,
        queues: Mapping[int, ClaimQueue],
        engine: EngineControl,
        *,
        freed: asyncio.Event,
        backlog_limit: int,
        prefixes: PrefixMemory | None = None,
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.counters: Counter[str] = Counter()
        self.commit_seconds = SecondsHistogram()
        self._queues = queues
        self._engine = engine
        self._freed = freed
        self._prefixes = prefixes
        self._choices: dict[str, tuple[Job, Choice]] = {}
        self._dirty = {shard: asyncio.Event() for shard in queues}
        self._news: dict[int, dict[str, None]] = {shard: {} for shard in queues}
        """Ids of jobs that may have something to commit, in the order in which they got it."""
        self._settled = asyncio.Event()
        self.backlog = 0
        """Tokens that are in no record yet."""
        self.backlog_limit = backlog_limit

    @property
    def congested(self) -> bool:
        """Whether so much waits for Redis that nothing new should start."""
        return self.backlog > self.backlog_limit

    def num_open_choices(self) -> int:
        """Sequences the engine runs or queues for this worker's jobs."""
        return len(self._choices)

    def num_yielding(self) -> int:
        """Those of them that give their seats to others."""
        return sum(job.yields for job, _ in self._choices.values())

    def jobs_of(self, shard: int) -> list[Job]:
        """Jobs whose keys live in this shard."""
        return [job for job in self.jobs.values() if shard_of(job.claim.rid) == shard]

    def add(self, job: Job) -> None:
        """Takes a job over; an older acquisition of the same request is dropped first."""
        self.drop(job.claim.rid, "superseded")
        self.jobs[job.claim.rid] = job
        self._choices |= {choice.engine_id: (job, choice) for choice in job.open_choices()}
        self.touch(job)

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """The events of one engine step. Those of jobs that are gone are ignored."""
        for event in events:
            known = self._choices.get(event.request_id)
            if known is None:
                continue
            job, choice = known
            had = len(choice.output)
            if needless := job.take(choice, event):
                self._stop_engine(needless)
            self.backlog += len(choice.output) - had
            if choice.finish_reason is not None:
                self._forget_ended(job)
            self._mark(job.claim.rid)
        self._update_pause()

    def cancel(self, rid: str) -> bool:
        """Ends the request with "abort" and its true usage. False: it is not one of ours."""
        job = self.jobs.get(rid)
        if job is not None:
            self._stop_engine(job.cancel())
            self.touch(job)
        return job is not None

    def fail(self, job: Job, code: str, message: str) -> None:
        """Ends a job with an error for the caller."""
        self._stop_engine(job.fail(code, message))
        self.touch(job)

    def touch(self, job: Job) -> None:
        """Something other than an event of the engine changed the job."""
        self._forget_ended(job)
        self._mark(job.claim.rid)

    def drop(self, rid: str, why: str) -> None:
        """Forgets a job that is no longer ours to finish and frees its blocks. Nothing is written."""
        job = self.jobs.pop(rid, None)
        if job is not None:
            self._stop_engine([choice.engine_id for choice in job.open_choices()])
            self._remove(job)
            self.counters[f"dropped_{why}"] += 1
            log.warning("request dropped", rid=rid, epoch=job.claim.epoch, why=why)

    async def run(self, shard: int) -> None:
        """Commits for ever. Redis being away, or refusing, only delays."""
        backoff = Backoff(0.05, 2.0)
        while True:
            await self._dirty[shard].wait()
            self._dirty[shard].clear()
            batch = self._collect(shard)
            if not batch:
                self._settled.set()
                continue
            started = time.monotonic()
            try:
                replies = await self._queues[shard].commit(batch)
            except REDIS_TROUBLE as error:
                self.counters["redis_errors"] += 1
                if not backoff.failing:
                    log.warning("commit delayed", shard=shard, records=len(batch), reason=str(error))
                await asyncio.sleep(backoff.next())
                for item in batch:  # the same records again: a lost reply is answered DUP
                    self._mark(item.claim.rid)
                continue
            self.commit_seconds.observe(time.monotonic() - started)
            backoff.reset()
            self._settle(batch, replies)

    async def flush(self) -> None:
        """Returns once everything delivered so far is committed (or its job dropped). The loops must be running."""
        for event in self._dirty.values():
            event.set()
        for rid in self.jobs:
            self._mark(rid)
        while any(event.is_set() for event in self._dirty.values()) or any(
            job.has_unsent() for job in self.jobs.values()
        ):
            self._settled.clear()
            await self._settled.wait()

    def _collect(self, shard: int) -> list[Commit]:
        """One record per request with news, plus what an earlier round could not commit."""
        batch: list[Commit] = []
        news = self._news[shard]
        while news:
            if len(batch) >= _MAX_BATCH:
                self._dirty[shard].set()
                break
            rid = next(iter(news))
            job = self.jobs.get(rid)
            if job is not None:
                self.backlog -= job.seal()
                batch += job.unsent(_MAX_BATCH - len(batch))
            if len(batch) < _MAX_BATCH:
                del news[rid]
        self._update_pause()
        return batch

    def _settle(self, batch: Sequence[Commit], replies: Sequence[CommitReply]) -> None:
        for item, reply in zip(batch, replies, strict=True):
            job = self.jobs.get(item.claim.rid)
            if job is None or job.claim != item.claim:
                continue
            if reply.kind in (ReplyKind.OK, ReplyKind.DUP):
                job.acked = max(job.acked, item.seq + 1)
                job.progressed = True
                if item.end:
                    self._finish(job)
            elif reply.kind is ReplyKind.GAP:
                log.warning("log went backwards, sending again", rid=item.claim.rid, seq=item.seq, next=reply.next)
                job.acked = reply.next
                self._mark(item.claim.rid)
            else:
                self.drop(item.claim.rid, reply.kind.name.lower())
        self._settled.set()

    def _mark(self, rid: str) -> None:
        shard = shard_of(rid)
        self._news[shard][rid] = None
        self._dirty[shard].set()

    def _finish(self, job: Job) -> None:
        del self.jobs[job.claim.rid]
        self._remove(job)
        usage = job.usage()
        if self._prefixes is not None:
            self._prefixes.add_answer(usage.completion_tokens)
            for prompt in job.request.prompts:  # only now does the engine let go of them
                self._prefixes.add(prompt, job.request.cache_salt)
        reasons = Counter(choice.finish_reason for choice in job.choices)
        for reason, count in reasons.items():
            self.counters[f"finished_{reason}"] += count
        log.info(
            "request finished",
            rid=job.claim.rid,
            reasons=dict(reasons),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )

    def _forget_ended(self, job: Job) -> None:
        ended = [c.engine_id for c in job.choices if c.finish_reason is not None and c.engine_id in self._choices]
        for engine_id in ended:
            del self._choices[engine_id]
        if ended:
            self._freed.set()

    def _remove(self, job: Job) -> None:
        self.backlog -= job.unsealed_tokens()
        for choice in job.choices:
            self._choices.pop(choice.engine_id, None)
        self._freed.set()

    def _stop_engine(self, engine_ids: Sequence[str]) -> None:
        for engine_id in engine_ids:
            self._engine.abort(engine_id)

    def _update_pause(self) -> None:
        """Hysteresis, so that the engine is not switched on and off with every record."""
        if self.congested:
            self._engine.pause(True)
        elif self.backlog <= self.backlog_limit // 2:
            self._engine.pause(False)
