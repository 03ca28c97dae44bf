"""The worker's side of the queue: take, acquire, commit, renew, hand back, reclaim, bury.

In: queue entries. Out: acquired requests with their log. Owns no truth, only what this process believes it holds; Redis
checks the epoch of every write. Nobody else in a worker touches the pending list.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared import keys, scripts
from shared.acquisition import Acquisition
from shared.claim import KINDS, Acquired, Claim, Commit, CommitReply, Consumer, Entry, RenewReply, ReplyKind
from shared.held import HeldRequests
from shared.messages import decode_request
from shared.pending import PendingEntries
from shared.queue import read_whole_log
from shared.waiting import Room, WaitingEntries

__all__ = ["Acquired", "Claim", "ClaimQueue", "Commit", "CommitReply", "Consumer", "Entry", "RenewReply", "ReplyKind"]

_OVER = (ReplyKind.FENCED, ReplyKind.CLOSED, ReplyKind.GONE)
_OWN_LIMIT = 1000
_GONE_CONSUMER_MS = 600_000
_SHY_LEASES = 10
"""How long a worker leaves to others what it lost by its silence."""
_BETWEEN_SUSPECTS = 8
"""New requests' choices that may start between two suspects."""


class ClaimQueue:
    """One consumer's view of its queues. Use it from one event loop.

    `blocking_redis` is for blocking reads only. The queues of all shards of a process share one `held`, for a suspect
    to be alone there.
    """

    def __init__(
        self, redis: Redis, blocking_redis: Redis, consumer: Consumer, held: HeldRequests | None = None
    ) -> None:
        self._redis = redis
        self._consumer = consumer
        self._queues = consumer.queues
        self._names = [name for queue in self._queues for name in (queue, keys.load_of_queue(queue))]
        names = (keys.ledger_prefix, keys.request_prefix, keys.log_prefix, keys.channel_prefix)
        self._commit_args: list[scripts.Arg] = [consumer.retention_ms, *(name(consumer.shard) for name in names)]
        self._held = HeldRequests() if held is None else held
        self._pending = PendingEntries(redis, self._held, consumer)
        self._begin = Acquisition(redis, consumer)
        self._waiting = WaitingEntries(redis, blocking_redis, consumer)
        self._unsure = True  # a predecessor of the same name may have left entries behind

    async def ensure_group(self) -> None:
        """Makes streams and groups where they are missing, always from the first entry on."""
        for queue in self._queues:
            try:
                await self._redis.xgroup_create(queue, keys.GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    async def read(
        self,
        count: int,
        block_ms: int = 2000,
        *,
        batch: int | None = None,
        reserve: int = 0,
        has_many: Sequence[str] = (),
        begin: int = 0,
    ) -> list[Entry]:
        """Waiting requests whose turn it is, for `count` choices (free slots), up to `batch` of them of class batch.

        The last `reserve` slots are not for the shares `has_many`. Up to `begin` new ones are acquired in the same
        call; give them to `acquire` at once, as all others. Interactive before batch, within a class shares in turn by
        tokens served. [] after `block_ms`, while a suspect runs, or when another worker was faster. A read that failed
        or was cancelled may have delivered what nobody saw: the next call looks there first. Raises REDIS_DOWN errors.
        """
        if count < 1 or not await self._held.wait_open(block_ms / 1000):
            return []
        room = Room(count, count if batch is None else batch, reserve, tuple(has_many))
        if self._held.suspects_wait and ((entries := await self._in_turn(room, begin)) or self._held.clearing):
            return entries
        if self._unsure:
            entries = await self.own_pending(count)
            if entries:
                return entries
        return await self._wait(room, begin, block_ms)

    async def _wait(self, room: Room, begin: int, block_ms: int) -> list[Entry]:
        self._unsure = True
        entries = await self._waiting.wait(room, begin, block_ms)
        self._unsure = False
        return entries

    async def _in_turn(self, room: Room, begin: int) -> list[Entry]:
        """While suspects wait: a few new requests, one suspect, a few new requests, … without a pause, which would add
        up. So a suspect waits for few, and a new request for one suspect, however many there are."""
        if self._held.newcomers_turn:
            self._held.newcomers_turn = False
            entries = await self._wait(room.at_most(_BETWEEN_SUSPECTS), begin, 0)
            if entries:
                return entries
        return await self.reclaim(room.choices, batch=room.batch)

    async def nudge(self) -> None:
        """Wakes this worker's own `read`: there is more room than it knows."""
        await self._waiting.nudge()

    async def leave(self) -> None:
        """Nothing that waits is kept for this worker any more. It takes nothing after that."""
        await self._waiting.leave()

    async def own_pending(self, count: int = _OWN_LIMIT) -> list[Entry]:
        """Entries pending under this name that this process does not hold: after a restart, an error, a lost reply."""
        entries, left = await self._pending.take(_OWN_LIMIT, 0, self._consumer.name)
        self._unsure = left or len(entries) > count
        return entries[:count]

    async def reclaim(self, count: int, *, batch: int | None = None) -> list[Entry]:
        """Up to `count` entries whose owner was silent for a lease, or that were handed back; `batch` as in `read`.

        Requests that made progress come first. A suspect comes alone, only when nothing unproved is held here; until
        its first record this object takes nothing else in.
        """
        entries, _ = await self._pending.take(count, self._consumer.lease_ms, "", batch=batch)
        return entries

    async def release(self, entries: Sequence[Entry]) -> None:
        """Puts entries back that were read but will not be acquired."""
        await self._pending.release(entries)

    async def release_all(self) -> int:
        """Puts back whatever was delivered and is not owned by this process (drain); how many entries."""
        return await self._pending.release_all()

    async def acquire(self, entries: Sequence[Entry]) -> list[Acquired]:
        """Makes this process the owner of each entry that is still to be run, with the log to continue from.

        Left out: ended ones; cancelled, late and poisonous ones, which get their terminal record here; what another
        task of this process acquires; what must not run beside a suspect (put back). On an error nothing counts as
        acquired: read() brings all of it again.
        """
        acquired: list[Acquired] = []
        excluded: list[Entry] = []
        try:
            for entry in entries:
                if not self._held.may_start(entry.rid):
                    excluded.append(entry)
                elif entry.rid not in self._held:
                    one = await self._acquire(entry)
                    acquired += [one] if one else []
            await self.release(excluded)
        except BaseException:  # also a cancellation: the caller never sees what was acquired
            self._unsure = True
            for one in acquired:
                self._held.drop(one.claim.rid, one.claim.epoch)
            raise
        finally:
            for entry in entries:
                self._held.forget(entry.rid)
        return acquired

    async def commit(self, items: Sequence[Commit]) -> list[CommitReply]:
        """Appends and publishes records in one call, each checked against its owner, in the order given."""
        if not items:
            return []
        args = [*self._commit_args]
        for item in items:
            claim, ending = item.claim, ""
            if item.end:
                klass = self._queues.index(claim.queue) + 1
                ending = f"{klass} {item.prompt_tokens} {item.completion_tokens} {item.cached_tokens}"
            args += (claim.rid, self._owner(claim), item.seq, item.payload, ending)
        flat = await scripts.COMMIT(self._redis, self._names, args)
        replies = [CommitReply(KINDS[kind], seq) for kind, seq in zip(flat[::2], flat[1::2], strict=True)]
        for item, reply in zip(items, replies, strict=True):
            if reply.kind in _OVER or (item.end and reply.kind is not ReplyKind.GAP):
                self._drop(item.claim, reply.kind)
            elif reply.kind is not ReplyKind.GAP:
                self._held.prove(item.claim.rid)
        return replies

    async def renew(self, claims: Sequence[Claim]) -> list[RenewReply]:
        """Keeps these leases for another `lease_ms`. Call it thrice as often, while the engine moves."""
        if not claims:
            return []
        names = list(self._queues)
        args: list[scripts.Arg] = [self._consumer.name, self._consumer.lease_ms]
        for claim in claims:
            names += [keys.request_key(claim.rid), keys.log_key(claim.rid)]
            args += [claim.rid, self._owner(claim), self._queues.index(claim.queue) + 1]
        flat = await scripts.RENEW(self._redis, names, args)
        replies = [RenewReply(ReplyKind(kind), bool(flag)) for kind, flag in zip(flat[::2], flat[1::2], strict=True)]
        for claim, reply in zip(claims, replies, strict=True):
            if reply.kind is not ReplyKind.OK:
                self._drop(claim, reply.kind)
        return replies

    async def hand_back(self, claims: Sequence[Claim]) -> None:
        """Gives requests back for another worker to continue at once; the try is not charged. Commit first."""
        if not claims:
            return
        names = [*self._names, *(keys.request_key(claim.rid) for claim in claims)]
        args: list[scripts.Arg] = [keys.control_channel(self._consumer.shard)]
        for claim in claims:
            args += [self._owner(claim), self._queues.index(claim.queue) + 1]
        await scripts.HAND_BACK(self._redis, names, args)
        for claim in claims:
            self._held.drop(claim.rid, claim.epoch)

    async def bury(self, claim: Claim, code: str, message: str) -> ReplyKind:
        """Ends a request with error `code` (of shared/errors.py) and a dead letter. CLOSED also answers a replay."""
        load = keys.load_of_queue(claim.queue)
        shard, retention_ms = self._consumer.shard, self._consumer.retention_ms
        names = [keys.request_key(claim.rid), keys.log_key(claim.rid), claim.queue, load, keys.dead_key(shard)]
        args: list[scripts.Arg] = [claim.rid, self._owner(claim), code, message, retention_ms]
        args += [keys.channel_name(claim.rid), keys.ledger_prefix(shard)]
        kind = ReplyKind(await scripts.BURY(self._redis, names, args))
        self._held.drop(claim.rid, claim.epoch)
        return kind

    async def remove_dead_consumers(self, idle_ms: int = _GONE_CONSUMER_MS) -> int:
        """Removes consumers that have nothing pending and were silent for `idle_ms`; how many."""
        return await self._pending.remove_dead_consumers(idle_ms)

    def _drop(self, claim: Claim, why: ReplyKind) -> None:
        self._held.drop(claim.rid, claim.epoch)
        if why is ReplyKind.FENCED:
            self._held.lose(claim.rid, _SHY_LEASES * self._consumer.lease_ms / 1000)

    def _owner(self, claim: Claim) -> str:
        """The fence: an epoch may come back after Redis lost writes, with this process's mark it cannot be mistaken."""
        return f"{claim.epoch}.{self._consumer.mark}"

    async def _acquire(self, entry: Entry) -> Acquired | None:
        rid = entry.rid
        self._held.reserve(rid)
        try:
            if (begun := await self._begin(entry)) is None:
                return None
            epoch, next_seq, tries, body = begun
            claim = Claim(rid, entry.entry_id, entry.queue, epoch)
            records = await read_whole_log(self._redis, rid, next_seq)
            try:
                request = decode_request(body)
            except msgspec.DecodeError:
                await self.bury(claim, "engine_failure", "The queued request could not be read by this worker.")
                return None
            if len(records) != next_seq:
                await self.bury(claim, "engine_failure", "Redis lost a part of the answer; it could not be continued.")
                return None
            self._held.acquired(rid, epoch, tries)
            return Acquired(claim, request, records, next_seq, tries)
        finally:
            self._held.drop(rid)  # the reservation, where it did not become an acquisition
