"""The only one that claims: queue entries in, jobs for the outbox and requests for the engine out.

Never takes more than there are free slots (sequences). Batch work, and what a tenant has beyond its part of the seats,
holds none of them against others: those take its seats inside the engine, so a worker has at most twice its slots. A
request of more choices than slots are left waits inside the engine; what came beyond the last slot goes back at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import structlog

from engine_worker.crowd import Crowd
from engine_worker.engine_loop import EngineLoop
from engine_worker.jobs import Job
from engine_worker.lease import Lease
from engine_worker.outbox import Outbox
from engine_worker.process import in_thread
from engine_worker.validation import ServedModel, check_request
from engine_worker.waiting import REDIS_TROUBLE, Backoff, wait_for_event
from shared.claims import Acquired, Claim, ClaimQueue, Entry
from shared.errors import ContextLengthExceeded, EngineFailure, HeadraceError, InvalidRequest
from shared.grammars.backend import GrammarError, TokenMatcher
from shared.histogram import SecondsHistogram
from shared.messages import decode_record
from shared.prefixes import PrefixMemory

__all__ = ["Intake"]

_RECLAIM_S = 1.0
"""Longest pause between two looks for what silent workers left; with short leases it is an eighth of the lease."""
_ACQUIRE_AT_ONCE = 8
"""Entries acquired before the first of them is started: a dead worker may have left hundreds."""
_CLEAN_S = 60.0
_ROOM_POLL_S = 0.5
"""Health and congestion have no event of their own."""
_CANCELS_KEPT = 10_000
_COMPILE_S = 10.0
"""For one grammar. Pods refuse what takes long, so this is for a pod that did not."""

log = structlog.get_logger(__name__)


class Intake:
    """Loops per shard: `read` waits for new entries, `reclaim` looks for those of silent or drained workers."""

    def __init__(
        self,
        queues: Mapping[int, ClaimQueue],
        outbox: Outbox,
        engine: EngineLoop,
        lease: Lease,
        served: ServedModel,
        *,
        freed: asyncio.Event,
        max_num_seqs: int,
        prefixes: PrefixMemory | None = None,
        lease_ms: int,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.queue_age_seconds = SecondsHistogram()
        self._queues = queues
        self._outbox = outbox
        self._engine = engine
        self._lease = lease
        self._served = served
        self._slots = max_num_seqs
        self._reclaim_s = min(_RECLAIM_S, lease_ms / 8000)
        self._freed = freed
        self._prefixes = prefixes
        self._crowd = Crowd(outbox, max_num_seqs)
        self._wake = {shard: asyncio.Event() for shard in queues}
        self._put_back = dict.fromkeys(queues, False)
        self._unplaced: dict[str, tuple[int, Claim]] = {}
        self._early_cancels: dict[str, None] = {}
        self._compiling: set[asyncio.Task[None]] = set()

    @property
    def free_slots(self) -> int:
        """Sequences that could start now; negative while a request of many choices queues inside the engine."""
        return self.empty_slots + self._outbox.num_yielding()

    @property
    def empty_slots(self) -> int:
        """Those of them that nobody sits on: only there what yields may start."""
        return self._slots - self._outbox.num_open_choices()

    def wake(self, shard: int) -> None:
        """Somebody handed requests back, or messages were missed: look at once."""
        self._wake[shard].set()

    def cancel(self, rid: str) -> None:
        """A cancellation from the control channel; one that overtakes its request is remembered for a while."""
        if not self._outbox.cancel(rid):
            self._early_cancels[rid] = None
            if len(self._early_cancels) > _CANCELS_KEPT:
                del self._early_cancels[next(iter(self._early_cancels))]

    async def read(self, shard: int) -> None:
        """Takes new entries for ever."""
        await self._persist("read", shard, self._read_once)

    async def reclaim(self, shard: int) -> None:
        """Takes over what other workers left, for ever: every second or more often, and at once after `wake`."""
        await self._persist("reclaim", shard, self._reclaim_once)

    async def clean(self, shard: int) -> None:
        """Removes consumers of workers long gone, for ever: once a minute."""
        await self._persist("clean", shard, self._clean_once)

    async def hand_back_unplaced(self) -> None:
        """After the loops were cancelled: gives back what was delivered or acquired but became no job."""
        for shard, queue in self._queues.items():
            await queue.hand_back([claim for owner, claim in self._unplaced.values() if owner == shard])
            await queue.release_all()
        self._unplaced.clear()

    async def _persist(self, what: str, shard: int, once: Callable[[int], Awaitable[None]]) -> None:
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                await once(shard)
                backoff.reset()
            except REDIS_TROUBLE as error:
                self._report(what, backoff, error)
                await asyncio.sleep(backoff.next())

    async def _read_once(self, shard: int) -> None:
        await self._room(lambda: not self._put_back[shard])  # what went back is older than what waits unread
        queue, shards, has_many = self._queues[shard], len(self._queues), self._crowd.has_many()
        share = max(1, self.free_slots // shards)
        if (empty := self.empty_slots) > 0:
            empty = max(1, empty // shards)
            reserve, nudge = max(0, share - empty), None
        else:
            empty, reserve, nudge = 0, share, asyncio.create_task(self._nudge(queue))
        try:
            entries = await queue.read(share, batch=empty, reserve=reserve, has_many=has_many, begin=_ACQUIRE_AT_ONCE)
        finally:
            if nudge is not None:
                nudge.cancel()
        await self._take(shard, entries)

    async def _nudge(self, queue: ClaimQueue) -> None:
        """Ends a read that began with no empty seat, as soon as there is one."""
        while self.empty_slots <= 0:
            self._freed.clear()
            await self._freed.wait()
        with suppress(*REDIS_TROUBLE):  # then the read ends by itself, with the same trouble or after two seconds
            await queue.nudge()

    async def _reclaim_once(self, shard: int) -> None:
        await wait_for_event(self._wake[shard], self._reclaim_s)
        self._wake[shard].clear()
        await self._room()
        entries = await self._queues[shard].reclaim(self.free_slots, batch=max(0, self.empty_slots))
        self._put_back[shard] = False
        self._freed.set()
        await self._take(shard, entries)

    async def _clean_once(self, shard: int) -> None:
        await asyncio.sleep(_CLEAN_S)
        await self._queues[shard].remove_dead_consumers()

    async def _room(self, allowed: Callable[[], bool] = lambda: True) -> None:
        """Returns as soon as something new may start here."""
        while self.free_slots <= 0 or self._outbox.congested or not self._lease.healthy or not allowed():
            self._freed.clear()
            await wait_for_event(self._freed, _ROOM_POLL_S)

    async def _take(self, shard: int, entries: Sequence[Entry]) -> None:
        """Acquires the entries and places each: a job, an error, or back to the queue."""
        if not entries:
            return
        refused: list[tuple[Claim, HeadraceError]] = []
        surplus: list[Claim] = []
        for first in range(0, len(entries), _ACQUIRE_AT_ONCE):
            for item in await self._queues[shard].acquire(entries[first : first + _ACQUIRE_AT_ONCE]):
                if (self.empty_slots if self._yields(item) else self.free_slots) <= 0:
                    surplus.append(item.claim)
                elif (error := self._start(item)) is not None:
                    refused.append((item.claim, error))
        # From here on a cancellation (drain) must not lose what is placed nowhere yet.
        self._unplaced |= {claim.rid: (shard, claim) for claim in [*surplus, *(claim for claim, _ in refused)]}
        for claim, error in refused:
            log.error("request buried", rid=claim.rid, code=error.code, reason=error.message)
            await self._insist(partial(self._queues[shard].bury, claim, error.code, error.message))
            del self._unplaced[claim.rid]
        if surplus:
            await self._insist(partial(self._queues[shard].hand_back, surplus))
            self._put_back[shard] = True
            for claim in surplus:
                del self._unplaced[claim.rid]

    def _yields(self, item: Acquired) -> bool:
        return item.request.klass == "batch" or item.request.share in self._crowd.has_many()

    async def _insist(self, call: Callable[[], Awaitable[object]]) -> None:
        """Repeats a replay-safe call until Redis has answered."""
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                await call()
                return
            except REDIS_TROUBLE as error:
                self._report("put back", backoff, error)
                await asyncio.sleep(backoff.next())

    def _report(self, what: str, backoff: Backoff, error: Exception) -> None:
        self.counters["redis_errors"] += 1
        if not backoff.failing:
            log.warning("queue not reachable", what=what, reason=str(error))

    def _start(self, item: Acquired) -> HeadraceError | None:
        """Makes a job of it and gives its open choices to the engine. An error means: bury it, it never made sense."""
        rid, request = item.claim.rid, item.request
        too_long: ContextLengthExceeded | None = None
        try:
            check_request(request, self._served)
        except ContextLengthExceeded as error:
            too_long = error  # a fair request for another limit: an error record, no dead letter
        except InvalidRequest as error:
            return error
        job = Job(item.claim, request, self._served.token_bytes, yields=self._yields(item))
        try:
            job.replay(item.records, map(decode_record, item.records))
        except (ValueError, msgspec.MsgspecError):
            return EngineFailure("The log of the request could not be read by this worker.")
        self._outbox.add(job)
        self._run(job, too_long)
        if self._prefixes is not None:
            for prompt in request.prompts:
                self._prefixes.add(prompt, request.cache_salt)
        self.counters["takeovers"] += item.claim.epoch > 1
        if item.claim.epoch == 1:  # an entry's id begins with the milliseconds at which it was queued
            self.queue_age_seconds.observe(time.time() - int(item.claim.entry_id.partition(b"-")[0]) / 1000)
        known = {"epoch": item.claim.epoch, "tries": item.tries, "logged": item.next_seq}
        log.info("request started", rid=rid, choices=request.num_choices, **known)
        if rid in self._early_cancels:
            del self._early_cancels[rid]
            self._outbox.cancel(rid)
        return None

    def _run(self, job: Job, error: ContextLengthExceeded | None) -> None:
        """Gives the job's open choices to the engine, or ends it with the error, also one of the engine's own door."""
        try:
            if error is not None:
                raise error
            grammar = job.request.sampling.grammar
            if grammar is not None and self._served.grammars is None:
                raise InvalidRequest("The worker cannot run this request: this model has no structured output here.")
            if grammar is None or self._served.grammars is None or not job.open_choices():
                self._add_choices(job, None)
            else:
                task = asyncio.create_task(self._compile(job, partial(self._served.grammars.matcher, grammar)))
                self._compiling.add(task)
                task.add_done_callback(self._compiling.discard)
        except InvalidRequest as refusal:
            self._outbox.fail(job, refusal.code, refusal.message)
        self._outbox.touch(job)

    def _add_choices(self, job: Job, new_matcher: Callable[[int], TokenMatcher] | None) -> None:
        served = self._served
        for choice in job.engine_requests(served.max_request_tokens, served.eos_token_ids, new_matcher):
            self._engine.add(choice)

    async def _compile(self, job: Job, new_matcher: Callable[[int], TokenMatcher]) -> None:
        """Compiles the job's grammar on a thread (once; it is kept), then gives the job's choices to the engine."""
        try:
            async with asyncio.timeout(_COMPILE_S):
                await in_thread(partial(new_matcher, 0))
            if self._outbox.jobs.get(job.claim.rid) is job:  # neither cancelled to its end nor taken over meanwhile
                self._add_choices(job, new_matcher)
        except (GrammarError, InvalidRequest) as refusal:
            self._outbox.fail(job, InvalidRequest.code, f"The output's grammar cannot be used: {refusal}")
        except TimeoutError:
            self._outbox.fail(job, InvalidRequest.code, "Compiling the output's grammar took too long.")
        self._outbox.touch(job)
