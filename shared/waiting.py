"""The waiting requests of one model and shard, as a worker takes them: in fair turn, without asking again and again.

In: how much room there is. Out: entries, claimed for this consumer. A worker that finds nothing sleeps on its bells;
each submit rings one of the sleepers, so a request costs one wake-up however many workers are idle.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared import keys, scripts
from shared.claim import Consumer, Entry

__all__ = ["Room", "WaitingEntries"]


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker has room for, in choices."""

    choices: int
    batch: int
    """Those of them that may be of class batch."""
    reserve: int = 0
    """The last so many are not for the shares of `has_many`, which have filled the other seats."""
    has_many: tuple[str, ...] = ()

    def at_most(self, choices: int) -> Room:
        """The same for fewer."""
        return replace(self, choices=min(choices, self.choices), batch=min(choices, self.batch))


class WaitingEntries:
    """One consumer's view. `blocking` is for sleeping only."""

    def __init__(self, redis: Redis, blocking: Redis, consumer: Consumer) -> None:
        self._redis = redis
        self._blocking = blocking
        self._name, shard, model = consumer.name, consumer.shard, consumer.model
        self._owner = (consumer.mark, consumer.lease_ms)
        self._queues = consumer.queues
        self._seat, self._room = keys.seat_key(shard, model, self._name), keys.room_key(shard, model)
        self._names = [self._seat]
        for queue in self._queues:
            self._names += [queue, keys.load_of_queue(queue)]
        self._prefixes = (keys.request_prefix(shard), keys.seat_key(shard, model, ""))
        self._own_bell = keys.own_bell_key(shard, model, self._name)
        self._bell, self._batch_bell = (keys.bell_key(shard, model, klass) for klass in keys.CLASSES)
        self._spare_bell = keys.spare_bell_key(shard, model, keys.CLASSES[0])

    async def take(self, room: Room, begin: int = 0) -> tuple[list[Entry], int]:
        """Entries for up to so many choices (the last request may have more), and in how many ms one becomes free that
        is kept for another worker until then; 0 = there is none. Up to `begin` of those that nobody has run are
        acquired in the same call."""
        args: list[scripts.Arg] = [self._name, secrets.token_hex(8), room.choices, room.batch, *self._prefixes]
        args += [*self._owner, begin, room.reserve, *room.has_many]
        kept_ms, *flat = await scripts.TAKE(self._redis, self._names, args)
        rows = zip(flat[::5], flat[1::5], flat[2::5], flat[3::5], flat[4::5], strict=True)
        queues = self._queues
        return [Entry(entry, rid.decode(), queues[klass - 1], *begun) for entry, rid, klass, *begun in rows], kept_ms

    async def wait(self, room: Room, begin: int, block_ms: int) -> list[Entry]:
        """As `take`, but sleeps up to `block_ms` for a bell where there is nothing, and until what is kept for another
        worker is free. [] also when another worker was faster."""
        clock = asyncio.get_running_loop().time
        end, slept = clock() + block_ms / 1000, False
        while True:
            entries, kept_ms = await self.take(room, begin)
            left = int((end - clock()) * 1000)
            if entries or left < 1 or (slept and not kept_ms):
                return entries
            await self.sleep(min(left, kept_ms or left), room)
            slept = True

    async def leave(self) -> None:
        """Forgets that there is room here."""
        await self._redis.hdel(self._room, self._name)
        await self._redis.delete(self._seat)

    async def sleep(self, ms: int, room: Room) -> None:
        """Until something is there for this worker, for `ms` at most."""
        bells = [self._own_bell, self._bell]
        if room.choices > room.reserve:
            bells.append(self._spare_bell)
        if room.batch > 0:
            bells.append(self._batch_bell)
        try:
            await self._blocking.blpop(bells, timeout=ms / 1000)
        except ResponseError as error:  # the server woke everybody (failover): a reason to look
            if not str(error).startswith("UNBLOCKED"):
                raise

    async def nudge(self) -> None:
        """Wakes this consumer's own `sleep`."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._own_bell)
            pipe.rpush(self._own_bell, 1)
            pipe.pexpire(self._own_bell, keys.LOAD_TTL_MS)
            calls: Any = pipe
            await calls.execute()
