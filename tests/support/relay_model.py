"""The model of the relay's state machine: what is true of a request, what a client of it has seen, who works on it.

In: a length. Out: the records of a request and the events that each cursor must get, and steps of the worker's side on
the real queue, which keep the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from redis.asyncio import Redis

from api_service.chunks import BEFORE_OPENING, StreamWriter
from api_service.relay import Relay
from api_service.stream import Stream
from shared import keys
from shared.claims import Acquired, Claim, ClaimQueue, Commit, Consumer, ReplyKind
from shared.messages import GenerateRequest
from tests.support.records import end_record, token_record
from tests.support.stream_client import parse_block

__all__ = ["LEASE_MS", "Client", "Truth", "Workers", "payload"]

LEASE_MS = 3_600_000
"""So long that only `fall_silent` ends a lease."""
Event = tuple[str, str, str | None]
"""id, text, finish reason."""


def payload(seq: int, length: int) -> bytes:
    """Record `seq` of a request of `length` records."""
    return end_record(seq, 4, seq) if seq == length - 1 else token_record(seq)


@dataclass
class Truth:
    """One request. `logged` is None while Redis may have forgotten it."""

    request: GenerateRequest
    length: int
    logged: int | None = 0
    owner: tuple[ClaimQueue, Claim] | None = None
    silent: tuple[ClaimQueue, Claim] | None = None
    """Its lease is over, but nobody else has it yet."""
    proved: bool = False
    former: list[tuple[ClaimQueue, Claim]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.logged == self.length

    def events_after(self, cursor: int) -> list[Event]:
        """What a client that has seen up to `cursor` must get."""
        rid, last = self.request.rid, self.length - 1
        tokens = [(f"{rid}:{seq}", f"<{100 + seq}>", None) for seq in range(last)]
        return [*tokens, (f"{rid}:{last}", "", "stop")][max(0, cursor + 1) :]


@dataclass
class Client:
    truth: Truth
    pod: Relay
    stream: Stream
    cursor: int = BEFORE_OPENING
    events: list[Event] = field(default_factory=list)
    ends: int = 0

    def __post_init__(self) -> None:
        self._writer = StreamWriter(self.stream.request, None, self.cursor)

    async def leave(self) -> None:
        self.pod.leave(self.stream)

    def read(self) -> None:
        """What has arrived since the last call."""
        for block in b"".join(map(self._writer.write, self.stream.take())).split(b"\n\n")[:-1]:
            event, _ = parse_block(block)
            if event["data"] == "[DONE]":
                self.ends += 1
                continue
            [choice] = json.loads(event["data"])["choices"]
            self.events.append((event["id"], choice["text"], choice["finish_reason"]))


class Workers:
    """One worker at a time, and those before it. The queue's side is real; the engine is `payload`."""

    def __init__(self, redis: Redis, blocking: Redis, known: list[Truth]) -> None:
        """`known` grows while the machine submits requests."""
        self.current: ClaimQueue
        self._redis = redis
        self._blocking = blocking
        self._known = known
        self._count = 0

    async def start_another(self) -> None:
        """The next worker, under a name of its own."""
        self._count += 1
        limits = {"lease_ms": LEASE_MS, "max_tries": 1000}
        self.current = ClaimQueue(self._redis, self._blocking, Consumer(f"w{self._count}", "tiny", **limits))
        await self.current.ensure_group()

    async def work(self, truth: Truth, count: int, together: bool) -> None:
        """The next `count` records, as far as the request has any; nothing while nobody can own it."""
        if truth.done or not await self.own(truth):
            return
        assert truth.owner is not None
        assert truth.logged is not None
        seqs = range(truth.logged, min(truth.logged + count, truth.length))
        for group in [list(seqs)] if together else [[seq] for seq in seqs]:
            assert await self.commit(truth, *truth.owner, *group) is ReplyKind.OK
            truth.logged, truth.proved = group[-1] + 1, True

    async def commit(self, truth: Truth, worker: ClaimQueue, claim: Claim, *seqs: int) -> ReplyKind:
        """Like the outbox: one call, several records. The one kind of all replies."""
        last = truth.length - 1
        items = [Commit(claim, seq, payload(seq, truth.length), seq == last, 4, seq) for seq in seqs]
        [kind] = {reply.kind for reply in await worker.commit(items)}
        return kind

    async def own(self, truth: Truth) -> bool:
        """Takes what there is until the worker has this one; what it holds unproved gets a record first."""
        for _ in range(2 * len(self._known) + 2):
            if truth.owner is not None:
                return True
            entries = await self.current.reclaim(10) or await self.current.read(10, 1)
            acquired = await self.current.acquire(entries)
            for one in acquired:
                self._begin(one)
            if truth.owner is None and not acquired:
                for other in self._known:
                    if other.owner is not None and not other.proved and not other.done:
                        await self.work(other, 1, True)
        return truth.owner is not None

    def _begin(self, one: Acquired) -> None:
        [truth] = [truth for truth in self._known if truth.request.rid == one.claim.rid]
        assert one.records == [payload(seq, truth.length) for seq in range(one.next_seq)]
        assert truth.logged in (None, one.next_seq)
        truth.former += [truth.silent] if truth.silent is not None else []
        truth.silent = None
        truth.logged, truth.owner, truth.proved = one.next_seq, (self.current, one.claim), False

    async def append_unheard(self, truth: Truth, count: int) -> None:
        """Records that reach the log and nobody else; never the last one."""
        if truth.done or not await self.own(truth):
            return
        assert truth.logged is not None
        rid = truth.request.rid
        for seq in range(truth.logged, min(truth.logged + count, truth.length - 1)):
            await self._redis.xadd(keys.log_key(rid), {"d": payload(seq, truth.length)}, id=f"{seq + 1}-0")
            await self._redis.hset(keys.request_key(rid), "next", str(seq + 1))
            truth.logged = seq + 1

    async def go_backwards(self, truth: Truth, kept: int) -> None:
        """Redis knows of the first `kept` records only."""
        rid = truth.request.rid
        async with self._redis.pipeline() as pipe:
            pipe.delete(keys.log_key(rid))
            for seq in range(kept):
                pipe.xadd(keys.log_key(rid), {"d": payload(seq, truth.length)}, id=f"{seq + 1}-0")
            pipe.pexpire(keys.log_key(rid), LEASE_MS)
            pipe.hset(keys.request_key(rid), "next", str(kept))
            await pipe.execute()

    async def fall_silent(self) -> None:
        """The worker's leases are over, and another one is there."""
        name = keys.queue_key(0, "tiny", "interactive")
        for item in await self._redis.xpending_range(name, keys.GROUP, "-", "+", 100, f"w{self._count}"):
            one = [item["message_id"]]
            await self._redis.xclaim(name, keys.GROUP, item["consumer"], 0, one, idle=2 * LEASE_MS, justid=True)
        await self.start_another()
        for truth in self._known:
            truth.silent, truth.owner = truth.owner or truth.silent, None
