"""The pod's side of the queue: submit, cancel, look at and restore requests, read their logs.

In: `GenerateRequest`s and request ids. Out: raw records and frozen views. Holds no state; Redis is the truth.
Every method raises one of `connections.REDIS_DOWN` while Redis cannot be reached.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from shared import keys, scripts
from shared.errors import QueueFull
from shared.limits import ANY, Terms, rate_limited, use_of
from shared.messages import GenerateRequest, decode_request, encode
from shared.queue_views import DeadLetter, Depth, Position, RequestState, Submitted, TenantUse

__all__ = [
    "DeadLetter",
    "Depth",
    "Position",
    "RequestQueue",
    "RequestState",
    "Submitted",
    "TenantUse",
    "log_page",
    "read_whole_log",
]

_MOST_PRIORITY = 4000
_LOG_PAGE = 1000
_UNBOUNDED = 2**52
"""A limit no queue reaches; Lua's numbers are exact up to 2**53."""


_OFFER_MS = 100
"""How long a request is kept for a worker that has its prefix cached and room for it."""


def log_page(rows: Any) -> list[bytes]:
    """The records of an XRANGE reply."""
    return [fields[b"d"] for _, fields in rows]


async def read_whole_log(redis: Redis, rid: str, next_seq: int) -> list[bytes]:
    """The log of a request that nobody else can write now, in pages: one huge reply would stall everybody.

    Shorter than `next_seq` when Redis lost a part of it.
    """
    records: list[bytes] = []
    while len(records) < next_seq:
        rows = await redis.xrange(keys.log_key(rid), min=f"{len(records) + 1}-0", max="+", count=_LOG_PAGE)
        if not rows:
            break
        records += log_page(rows)
    return records


def _dead_letter(entry_id: Any, fields: Any) -> DeadLetter:
    text = {name.decode(): value.decode() for name, value in fields.items() if name != b"body"}
    model = text["queue"].split(":queue:", 1)[1].rsplit(":", 1)[0]
    return DeadLetter(
        id=entry_id.decode(),
        rid=text["rid"],
        model=model,
        code=text["code"],
        message=text["message"],
        tenant=text["tenant"],
        tries=int(text["tries"]),
        body=fields[b"body"],
    )


class RequestQueue:
    """All a pod does to the queue. One for the whole process; safe for any number of tasks."""

    def __init__(self, redis: Redis, *, retention_ms: int = keys.RETENTION_MS) -> None:
        self._redis = redis
        self._retention_ms = retention_ms

    async def submit(
        self,
        request: GenerateRequest,
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        idempotency: str = "",
        idempotency_ttl_ms: int = 0,
        terms: Terms = ANY,
    ) -> Submitted:
        """Queues a request once, however often the call is sent. Subscribe to its channel before.

        `max_waiting` requests and `max_waiting_tokens` prompt tokens bound the request's own queue (model, class,
        shard). `idempotency` is a digest of the client's key and tenant; its requests must all go to one shard, so
        choose the shard of the rid from the digest. Limits hold for the request's share within its shard, so all of a
        limited share's requests must go to one. Raises QueueFull with `retry_after` in seconds (1 to 60), RateLimited.
        """
        shard, limits = keys.shard_of(request.rid), terms.limits
        idem_ttl = (idempotency_ttl_ms or self._retention_ms) if idempotency else 0
        names = [*self._own_keys(request), keys.idempotency_key(shard, idempotency)]
        names += [keys.limit_key(shard, request.share), keys.open_key(shard, request.share)]
        names += [keys.own_bell_key(shard, request.model, terms.prefer)]
        args: list[scripts.Arg] = [max_waiting, max_waiting_tokens, idem_ttl, keys.request_prefix(shard), _OFFER_MS]
        args += [limits.requests_per_minute, limits.tokens_per_minute, limits.max_open]
        reply = await scripts.SUBMIT(self._redis, names, [*self._head(request, terms.prefer), *args])
        if reply[0] == -1:
            _, seconds, waiting, tokens = reply
            raise QueueFull(
                f"The queue of model '{request.model}' is full: {waiting} requests with {tokens} prompt tokens wait. "
                f"Retry in {seconds} s.",
                retry_after=float(seconds),
            )
        if reply[0] == -2:
            _, which, wait_ms, requests, tokens = reply
            raise rate_limited(request, limits, which, wait_ms, use_of(limits, requests, tokens))
        use = use_of(limits, reply[2], reply[3]) if len(reply) > 2 else None
        return Submitted(reply[1].decode(), reply[0] == 1, use)

    async def restore(self, request: GenerateRequest, records: Sequence[bytes]) -> bool:
        """Queues an accepted, unfinished request again when Redis lost its metadata or its entry.

        `records`: every record received so far, from seq 0, without a terminal one. False = nothing was lost, or
        another caller was first.
        """
        args: list[scripts.Arg] = [*self._head(request), *records]
        return bool(await scripts.RESTORE(self._redis, self._own_keys(request), args))

    async def cancel(self, rid: str) -> bool:
        """Ends a request that nobody runs at once, else tells its worker. False = unknown or already ended."""
        queue = await self._queue_of(rid)
        if queue is None:
            return False
        names = [keys.request_key(rid), keys.log_key(rid), queue, keys.load_of_queue(queue)]
        shard = keys.shard_of(rid)
        args: list[scripts.Arg] = [rid, self._retention_ms, keys.channel_name(rid), keys.control_channel(shard)]
        args += [keys.ledger_prefix(shard)]
        return bool(await scripts.CANCEL(self._redis, names, args))

    async def state(self, rid: str) -> RequestState | None:
        """None = never known, expired, or lost by Redis. Raises msgspec.ValidationError on a foreign body."""
        fields = ["state", "epoch", "next", "cancel", "deadline", "body", "tenant"]
        values: Any = await self._redis.hmget(keys.request_key(rid), fields)
        state, epoch, next_seq, cancel, deadline, body, tenant = values
        if state is None:
            return None
        return RequestState(
            state=state.decode(),
            epoch=int(epoch),
            next=int(next_seq),
            cancel=cancel is not None,
            deadline_ms=int(deadline),
            request=decode_request(body),
            tenant=tenant.decode(),
        )

    async def read_log(self, rid: str, after: int = -1, limit: int = 1000) -> list[bytes]:
        """Raw records with seq > `after`, in order, at most `limit`."""
        rows = await self._redis.xrange(keys.log_key(rid), min=f"{after + 2}-0", max="+", count=limit)
        return log_page(rows)

    async def depth(self, model: str, shard: int = 0) -> Depth:
        """Waiting and running requests of a model in one shard, all classes together."""
        names = [key(shard, model, klass) for klass in keys.CLASSES for key in (keys.queue_key, keys.load_key)]
        waiting, running, tokens, wait_ms, batch = await scripts.DEPTH(self._redis, names, [])
        return Depth(waiting, running, tokens, wait_ms / 1000 if wait_ms >= 0 else None, batch)

    async def tenants(self, model: str, shard: int = 0, most: int = 20) -> list[TenantUse]:
        """The shares that were served most, and up to as many that are served next, with all classes together."""
        found: dict[str, TenantUse] = {}
        for klass in keys.CLASSES:
            flat = await scripts.TENANTS(self._redis, [keys.queue_key(shard, model, klass)], [most])
            for name, served, waiting in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
                share = name.decode()
                before = found.get(share, TenantUse(share, 0, 0))
                found[share] = TenantUse(share, before.served_tokens + served, before.waiting + waiting)
        return sorted(found.values(), key=lambda use: (-use.served_tokens, use.share))

    async def position(self, rid: str) -> Position | None:
        """None = unknown or ended; ahead 0 and 0.0 s = running."""
        queue = await self._queue_of(rid)
        if queue is None:
            return None
        names = [keys.request_key(rid), queue, keys.load_of_queue(queue), *keys.queues_before(queue)]
        reply = await scripts.POSITION(self._redis, names, [])
        if reply[0] < 0:
            return None
        return Position(reply[0], reply[1] / 1000 if reply[1] >= 0 else None)

    async def dead_letters(self, shard: int = 0, limit: int = 100) -> list[DeadLetter]:
        """The newest dead letters of a shard, newest first."""
        rows: Any = await self._redis.xrevrange(keys.dead_key(shard), count=limit)
        return [_dead_letter(entry_id, fields) for entry_id, fields in rows]

    async def drop(self, letter_id: str, shard: int = 0) -> bool:
        """Deletes one dead letter. False = there is none of this id."""
        return bool(await self._redis.xdel(keys.dead_key(shard), letter_id))

    async def replay(self, letter_id: str, shard: int = 0) -> str | None:
        """Queues a dead letter's request anew, without a deadline, and deletes the letter; the new request id.

        None = there is none of this id. Raises msgspec.ValidationError when its body is not a request.
        """
        rows: Any = await self._redis.xrange(keys.dead_key(shard), min=letter_id, max=letter_id)
        if not rows:
            return None
        request = decode_request(_dead_letter(*rows[0]).body)
        again = msgspec.structs.replace(request, rid=keys.new_rid(shard), deadline_ms=0)
        await self.submit(again, max_waiting=_UNBOUNDED, max_waiting_tokens=_UNBOUNDED)
        await self.drop(letter_id, shard)
        return again.rid

    async def _queue_of(self, rid: str) -> str | None:
        found: Any = await self._redis.hget(keys.request_key(rid), "queue")
        return None if found is None else found.decode()

    @staticmethod
    def _own_keys(request: GenerateRequest) -> list[str]:
        shard = keys.shard_of(request.rid)
        place = (shard, request.model, request.klass)
        return [keys.request_key(request.rid), keys.log_key(request.rid), keys.queue_key(*place), keys.load_key(*place)]

    @staticmethod
    def _head(request: GenerateRequest, prefer: str = "") -> list[scripts.Arg]:
        """What submit and restore write; the nonce tells a resent call from a second one."""
        return [
            request.rid,
            secrets.token_hex(8),
            encode(request),
            request.tenant,
            request.deadline_ms,
            request.num_choices,
            request.prompt_tokens,
            request.share,
            f"{request.weight:.6f}",
            max(-_MOST_PRIORITY, min(_MOST_PRIORITY, request.priority)),
            request.max_output_tokens,
            prefer,
        ]
