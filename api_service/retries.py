"""Which earlier request a call may be a retry of: Idempotency-Key, or the SDKs' retry count with the same body.

In: headers, tenant, path and body. Out: a `RetryKey` whose digest leads through Redis to the earlier request. The
SDKs of OpenAI send `x-stainless-retry-count` with every attempt: 0 leaves a trace, a later one looks for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import WatchError

from api_service.chunks import terminal_error
from shared.errors import InvalidRequest
from shared.keys import idempotency_key, shard_of
from shared.messages import GenerateRequest, decode_record
from shared.queue import RequestQueue, RequestState

__all__ = ["RetryKey", "earlier_request", "retry_key", "same_request", "shard_of_digest"]

RETRY_WINDOW_MS = 120_000
"""How long an SDK's plain retry finds the first attempt."""
_MAX_KEY_LENGTH = 255


@dataclass(frozen=True, slots=True)
class RetryKey:
    digest: str
    ttl_ms: int
    """0 = as long as finished requests are kept."""
    attach: bool
    """False: a first attempt, which must not find an earlier equal call but can be found itself."""


def retry_key(headers: Mapping[str, str], tenant: str, path: str, body: bytes) -> RetryKey | None:
    """Raises InvalidRequest for an Idempotency-Key that is empty or too long."""
    given = headers.get("idempotency-key")
    if given is not None:
        if not 0 < len(given) <= _MAX_KEY_LENGTH:
            why = f"'Idempotency-Key' must have 1 to {_MAX_KEY_LENGTH} characters."
            raise InvalidRequest(why, param="Idempotency-Key")
        return RetryKey(_digest("key", tenant, path, given.encode()), 0, attach=True)
    count = headers.get("x-stainless-retry-count", "")
    if not count.isascii() or not count.isdigit():
        return None
    return RetryKey(_digest("body", tenant, path, body), RETRY_WINDOW_MS, attach=int(count[:9]) > 0)


def _digest(kind: str, tenant: str, path: str, content: bytes) -> str:
    return hashlib.sha256("\0".join((kind, tenant, path, "")).encode() + content).hexdigest()


def shard_of_digest(digest: str, shards: int) -> int:
    """All requests of one digest go to one shard, so that one script sees them."""
    return int(digest[:8], 16) % shards


def same_request(one: GenerateRequest, other: GenerateRequest) -> bool:
    """Whether two calls ask for the same thing; a seed may have been drawn by the pod, ids and times always differ."""
    return _essence(one) == _essence(other)


def _essence(request: GenerateRequest) -> tuple[object, ...]:
    sampling = dataclasses.replace(request.sampling, seed=0)
    return (request.kind, request.model, request.prompts, request.n, request.stop, sampling, request.echo)


async def earlier_request(
    queue: RequestQueue, redis: Redis, rid: str, request: GenerateRequest, retry: RetryKey
) -> RequestState | None:
    """The request that `retry` led to, unless it expired, was cancelled or failed: then its key is freed, and None.

    Raises InvalidRequest when it asked for something else.
    """
    state = await queue.state(rid)
    if state is None:
        return None
    if not same_request(state.request, request):
        raise InvalidRequest("This Idempotency-Key was used for a different request.", param="Idempotency-Key")
    failed = state.cancel
    if state.state == "done":
        last = await queue.read_log(rid, after=state.next - 2, limit=1)
        failed = not last or terminal_error(decode_record(last[0])) is not None
    if failed:
        await _forget(redis, rid, retry.digest)
    return None if failed else state


async def _forget(redis: Redis, rid: str, digest: str) -> None:
    """Frees a key whose request came to nothing, so that the retry generates anew. Only if it still names `rid`."""
    key = idempotency_key(shard_of(rid), digest)
    async with redis.pipeline() as pipe:
        await pipe.watch(key)
        try:
            holder = await pipe.get(key)
        except WatchError as error:  # what redis-py makes of a connection that breaks while it watches
            raise RedisConnectionError(str(error)) from error
        if holder != rid.encode():
            return
        pipe.multi()  # type: ignore[no-untyped-call]
        pipe.delete(key)
        try:
            await pipe.execute()
        except WatchError:
            return  # another retry was faster
