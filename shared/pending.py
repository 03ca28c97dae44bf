"""The pending list: taking entries over, putting them back, removing consumers that are gone.

In: what Redis lists as delivered but not acknowledged. Out: entries for ClaimQueue to acquire, suspects last and alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from shared import keys, scripts
from shared.claim import Consumer, Entry
from shared.held import HeldRequests

__all__ = ["PendingEntries", "release_consumer"]

_ANY_SUSPECT = ""
"""Stands in HeldRequests for a suspect whose id is not known yet."""


class PendingEntries:
    """One consumer's view of the pending lists."""

    def __init__(self, redis: Redis, held: HeldRequests, consumer: Consumer) -> None:
        self._redis = redis
        self._held = held
        self._consumer = consumer
        self._queues = consumer.queues

    async def take(self, count: int, idle_ms: int, whose: str, *, batch: int | None = None) -> tuple[list[Entry], bool]:
        """Up to `count` entries idle for `idle_ms` (of consumer `whose`, "" = anybody), and whether suspects are left.
        At most `batch` of them of class batch; None = no such limit.

        Requests with progress first; a suspect only when there is nothing else and nothing unproved is held here.
        """
        if count < 1 or not self._held.may_start(_ANY_SUSPECT):
            return [], True
        taken: list[Entry] = []
        suspected: list[str] = []
        for queue, most in zip(self._queues, (count, count if batch is None else batch), strict=True):
            if most < 1:
                continue
            left = max(0, min(count, most) - len(taken))
            entries, suspects = await self._reclaim(queue, left, idle_ms, whose, suspect=False)
            taken += entries
            suspected += [queue] if suspects else []
        if not suspected:
            self._held.open()
            return taken, False
        self._held.suspects_wait = True
        if taken or self._held.unproved or not self._held.may_start(_ANY_SUSPECT):
            self._held.make_room(self._consumer.lease_ms / 1000)
            return taken, True
        self._held.expect(_ANY_SUSPECT)  # at once: another task may be about to acquire what it has read
        try:
            entries, _ = await self._reclaim(suspected[0], 1, idle_ms, whose, suspect=True)
            self._held.newcomers_turn = bool(entries)
            for entry in entries:
                self._held.expect(entry.rid)
        finally:
            self._held.forget(_ANY_SUSPECT)
        return entries, True

    async def release(self, entries: Sequence[Entry]) -> None:
        """Puts back what was delivered but will not be acquired."""
        for queue in self._queues:
            mine = [entry for entry in entries if entry.queue == queue]
            if mine:
                await _release(self._redis, queue, self._consumer, mine, self._held.ids())
        for entry in entries:
            self._held.forget(entry.rid)

    async def release_all(self) -> int:
        """Puts back everything delivered that this process does not run; how many entries."""
        runs = self._held.ids()
        return sum([await _release(self._redis, queue, self._consumer, (), runs) for queue in self._queues])

    async def remove_dead_consumers(self, idle_ms: int) -> int:
        """Removes consumers that have nothing pending and were silent for `idle_ms`; how many."""
        return sum([await scripts.REMOVE_CONSUMER(self._redis, [queue], [idle_ms]) for queue in self._queues])

    async def _reclaim(
        self, queue: str, count: int, idle_ms: int, whose: str, *, suspect: bool
    ) -> tuple[list[Entry], int]:
        me = self._consumer
        args: list[scripts.Arg] = [me.name, me.mark, idle_ms, count, whose, int(suspect), me.max_tries]
        reply = await scripts.RECLAIM(self._redis, [queue], [*args, keys.request_prefix(me.shard), *self._held.lost()])
        pairs = zip(reply[1::2], reply[2::2], strict=True)
        entries = [Entry(entry_id, rid.decode(), queue) for entry_id, rid in pairs]
        return [entry for entry in entries if entry.rid not in self._held], reply[0]


async def release_consumer(redis: Redis, name: str, model: str, shard: int = 0) -> int:
    """For a supervisor that saw a worker exit: all it ran becomes claimable now, not after a lease. How many entries.

    Call it only for a process that is surely gone. The tries of what it ran stay counted.
    """
    gone = Consumer(name, model, shard, mark="")
    return sum([await _release(redis, queue, gone) for queue in gone.queues])


async def _release(
    redis: Redis, queue: str, consumer: Consumer, entries: Sequence[Entry] = (), runs: Sequence[str] = ()
) -> int:
    names, shard = [queue, keys.load_of_queue(queue)], consumer.shard
    args: list[scripts.Arg] = [consumer.name, consumer.mark, keys.control_channel(shard), keys.request_prefix(shard)]
    args += [len(runs), *runs, *(entry.entry_id for entry in entries)]
    released: int = await scripts.RELEASE(redis, names, args)
    return released
