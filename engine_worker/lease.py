"""Keeps this worker's requests its own, as long as its engine gets on; the only one that renews.

In: the outbox's jobs and the engine's progress. Out: renewed leases, jobs dropped that others own, cancellations.
A hung engine renews nothing, so its requests go to other workers; a wrong guess costs work, never correctness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from engine_worker.engine_loop import EngineLoop
from engine_worker.outbox import Outbox
from engine_worker.waiting import REDIS_TROUBLE, wait_for_event
from shared.claims import ClaimQueue, ReplyKind

__all__ = ["Lease"]

log = structlog.get_logger(__name__)


class Lease:
    """Renews every quarter of `lease_ms`, and at once after `renew_now`. `step_limit_ms` bounds one engine step."""

    def __init__(
        self,
        queues: Mapping[int, ClaimQueue],
        outbox: Outbox,
        engine: EngineLoop,
        *,
        lease_ms: int,
        step_limit_ms: int,
    ) -> None:
        self._queues = queues
        self._outbox = outbox
        self._engine = engine
        self._interval = lease_ms / 4000
        self._step_limit = step_limit_ms / 1000
        self._steps_at_renewal = -1
        self._hung_reported = False
        self._delay_reported = False
        self._now = asyncio.Event()

    def renew_now(self) -> None:
        """Cancellations may have been missed: their flags come with the next renewal."""
        self._now.set()

    @property
    def healthy(self) -> bool:
        """Whether the engine gets on: it has moved since the last renewal, or rests, or its step is still young."""
        moved = self._engine.steps != self._steps_at_renewal
        return moved or self._engine.idle or self._engine.step_age < self._step_limit

    async def run(self) -> None:
        """Renews for ever."""
        while True:
            await wait_for_event(self._now, self._interval)
            self._now.clear()
            if not self.healthy:
                self._report_hung()
                continue
            self._hung_reported = False
            self._steps_at_renewal = self._engine.steps
            try:
                await self._renew()
                self._delay_reported = False
            except REDIS_TROUBLE as error:
                if not self._delay_reported:
                    log.warning("renewal delayed", reason=str(error))
                self._delay_reported = True

    def _report_hung(self) -> None:
        """Once per hang, not once per tick."""
        if not self._hung_reported:
            age = round(self._engine.step_age, 1)
            log.error("engine step takes too long, leases are not renewed", step_age_s=age)
        self._hung_reported = True

    async def _renew(self) -> None:
        for shard, queue in self._queues.items():
            claims = [job.claim for job in self._outbox.jobs_of(shard)]
            for claim, reply in zip(claims, await queue.renew(claims), strict=True):
                job = self._outbox.jobs.get(claim.rid)
                if job is None or job.claim != claim:
                    continue
                if reply.kind is ReplyKind.CLOSED and job.sealed:
                    continue  # by our own last record; the answer to it is on its way
                if reply.kind is not ReplyKind.OK:
                    self._outbox.drop(claim.rid, reply.kind.name.lower())
                elif reply.cancelled:
                    self._outbox.cancel(claim.rid)
