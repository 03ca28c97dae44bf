"""The acquire call: makes this process the owner of a delivered entry, where the call that gave it has not done so.

In: an entry. Out: what is needed to run its request from where its log ends. What it must not run ends in the script.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from redis.asyncio import Redis

from shared import keys, scripts
from shared.claim import Consumer, Entry

__all__ = ["Acquisition", "Begun"]


class Begun(NamedTuple):
    """A request that is this process's to run."""

    epoch: int
    next_seq: int
    """Records in its log."""
    tries: int
    """Owners in a row, this one included, without a committed record."""
    body: bytes


class Acquisition:
    """For one consumer."""

    def __init__(self, redis: Redis, consumer: Consumer) -> None:
        self._redis = redis
        self._who = (consumer.name, consumer.mark)
        self._limits = (consumer.lease_ms, consumer.max_tries, consumer.retention_ms)

    async def __call__(self, entry: Entry) -> Begun | None:
        """None for one that is not to be run here."""
        if entry.epoch:
            return Begun(entry.epoch, 0, 1, entry.body)
        kind, *values = await scripts.ACQUIRE(self._redis, *self.call(entry))
        return Begun(*values) if kind == b"RUN" else None

    def call(self, entry: Entry) -> tuple[list[str], list[scripts.Arg]]:
        """Keys and arguments of a new call of the script."""
        rid, shard = entry.rid, keys.shard_of(entry.rid)
        names = [keys.request_key(rid), keys.log_key(rid), entry.queue, keys.load_of_queue(entry.queue)]
        args: list[scripts.Arg] = [rid, entry.entry_id, *self._who, secrets.token_hex(8), *self._limits]
        return [*names, keys.dead_key(shard)], [*args, keys.channel_name(rid), keys.ledger_prefix(shard)]
