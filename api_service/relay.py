"""Requests into the queue and their records back: submit, attach, resume, and what happens when a client goes away.

In: GenerateRequests and ids. Out: `Stream`s that fill by themselves. Every Redis call runs in a task owned here,
never in a handler that a disconnect may cancel: a connection with a half-read reply would answer the next command
wrongly.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import structlog
from redis.asyncio import Redis

from api_service.follower import Follower
from api_service.metrics import Metrics
from api_service.reachability import Reachability
from api_service.retries import RetryKey, earlier_request
from api_service.settings import Settings
from api_service.stream import Stream, goes_on_elsewhere, promise
from shared.channel import Feed, Subscriber
from shared.connections import REDIS_DOWN
from shared.errors import (
    EngineFailure,
    HeadraceError,
    Overloaded,
    RedisUnavailable,
    StreamExpired,
    StreamNotFound,
)
from shared.keys import channel_name, idempotency_key, shard_of
from shared.limits import ANY, Terms
from shared.messages import GenerateRequest
from shared.queue import RequestQueue, RequestState

__all__ = ["Relay"]

ACCEPT_TIMEOUT_S = 8.0
"""A request that Redis has not accepted by then is refused (and cancelled, should it have arrived after all), even if
Redis answers others. Once it answers nobody, `Reachability` ends the waiting much sooner."""
CANCEL_RETRY_S = 60.0
_CLOSE_S = 1.0
_ABANDON = "abandon"

_T = TypeVar("_T")
log = structlog.get_logger(__name__)


class Relay:
    """All streams of this pod. One event loop."""

    def __init__(
        self,
        queue: RequestQueue,
        redis: Redis,
        subscriber: Subscriber,
        reachability: Reachability,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._queue = queue
        self._redis = redis
        self._subscriber = subscriber
        self._reachability = reachability
        self._metrics = metrics
        self._max_waiting = max(1, settings.max_queue_requests // settings.shards)
        self._max_waiting_tokens = max(1, settings.max_queue_tokens // settings.shards)
        self._streams: set[Stream] = set()
        self._listening: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving = False

    @property
    def open_streams(self) -> int:
        """Streams whose client is still there."""
        return sum(not stream.left and not stream.over for stream in self._streams)

    async def open(
        self, request: GenerateRequest, retry: RetryKey | None, deadline_s: float | None, terms: Terms = ANY
    ) -> Stream:
        """Queues a request, or attaches to the one it repeats. Returns once Redis has accepted it.

        Raises QueueFull, RateLimited, RedisUnavailable, InvalidRequest (an idempotency key used for something else),
        Overloaded (the pod is leaving).
        """
        if self._leaving:
            raise Overloaded("This server is shutting down. Send the request again.", retry_after=1.0)
        self._reachability.check()
        stream, accepted = Stream(request, owned=True, terms=terms), promise()
        self._run_stream(stream, self._submit(stream, retry, deadline_s, accepted), accepted)
        return await self._confirmed(stream, accepted)

    async def resume(self, rid: str, tenant: str) -> tuple[Stream, RequestState]:
        """A stream of everything a request has logged and will log. Raises StreamExpired, StreamNotFound (another
        tenant's), RedisUnavailable, PodDraining."""
        try:
            state = await self.detached(self._queue.state(rid))
        except REDIS_DOWN as error:
            raise self._reachability.error() from error
        if state is None:
            raise StreamExpired("This stream has ended and is no longer kept.")
        if state.tenant != tenant:
            raise StreamNotFound("There is no stream of this id.")
        if self._leaving:
            raise goes_on_elsewhere(rid)
        stream, joined = Stream(state.request, owned=False), promise()
        self._run_stream(stream, self._join(stream, joined), joined)
        # Not before we are heard: a pod whose client leaves asks whether anybody else follows the request.
        return await self._confirmed(stream, joined), state

    def leave(self, stream: Stream) -> None:
        """The client has gone. The request ends with it, unless it asked for a grace time or somebody else listens."""
        if not stream.left and not stream.over:
            stream.left = True
            self._spawn(self._abandon(stream), _ABANDON)

    def cancel(self, stream: Stream) -> None:
        """Ends the request of a stream that cannot be resumed, unless others follow it."""
        self._spawn(self._cancel(stream.request.rid, stream), _ABANDON)

    def drain(self) -> None:
        """Ends every stream with an error that says how to go on, and begins none; the requests themselves run on."""
        self._leaving = True
        for stream in self._streams:
            if not stream.over and not stream.left:
                self._metrics.cut("drain")
            stream.fail(goes_on_elsewhere(stream.request.rid))

    async def close(self) -> None:
        """Ends all tasks within about a second; pending cancellations of left requests get that second."""
        leaving = [task for task in self._tasks if task.get_name() == _ABANDON]
        if leaving:
            await asyncio.wait(leaving, timeout=_CLOSE_S)
        for stream in self._streams:
            stream.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)

    async def detached(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Awaits a Redis call that runs to its end even if the awaiting handler is cancelled.

        Raises RedisUnavailable once Redis is known to be away, and what the call raises.
        """
        return await self._reachability.answer(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, _T], name: str = "relay") -> asyncio.Task[_T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _run_stream(
        self, stream: Stream, work: Coroutine[Any, Any, None], accepted: asyncio.Future[None] | None = None
    ) -> None:
        """A relay task that fails, by whatever fault of ours, ends its stream with an error: no client hangs."""

        def finished(task: asyncio.Task[None]) -> None:
            self._streams.discard(stream)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, HeadraceError):
                log.error("a relay task failed", rid=stream.request.rid, exc_info=error)
            known = error if isinstance(error, HeadraceError) else EngineFailure("The server failed on this request.")
            if accepted is not None and not accepted.done():
                accepted.set_exception(known)
            if error is not None:
                stream.fail(known)

        self._streams.add(stream)
        self._spawn(work).add_done_callback(finished)

    async def _submit(
        self, stream: Stream, retry: RetryKey | None, deadline_s: float | None, accepted: asyncio.Future[None]
    ) -> None:
        request = stream.request
        for _ in range(3):
            async with self._listen(request.rid) as feed:
                if stream.left and not request.grace_ms:  # refused before Redis knew of it
                    stream.close()
                    return
                earlier = await self._queue_up(stream, retry)
                if earlier is None:
                    accepted.set_result(None)
                    if stream.left:  # while Redis was slow; a cancellation may have come too early
                        self._spawn(self._abandon(stream), _ABANDON)
                    await Follower(stream, self._queue, self._metrics, deadline_s).follow(feed)
                    return
            state = None
            if retry is not None:
                state = await earlier_request(self._queue, self._redis, earlier, request, retry)
            if state is not None:
                names = ("include_usage", "continuous_usage")  # how this client wants the same answer
                wanted = {name: getattr(request, name) for name in names}
                stream.request, stream.owned = msgspec.structs.replace(state.request, **wanted), False
                accepted.set_result(None)
                await self._join(stream)
                return
        raise Overloaded("Other attempts of this request are in the way. Retry soon.", retry_after=1.0)

    async def _queue_up(self, stream: Stream, retry: RetryKey | None) -> str | None:
        """None when accepted, else the id of the earlier request that this one repeats."""
        request = stream.request
        attach = retry is not None and retry.attach
        try:
            submitted = await self._queue.submit(
                request,
                max_waiting=self._max_waiting,
                max_waiting_tokens=self._max_waiting_tokens,
                idempotency=retry.digest if retry is not None and attach else "",
                idempotency_ttl_ms=retry.ttl_ms if retry is not None else 0,
                terms=stream.terms,
            )
            stream.use = submitted.use
            if not submitted.created:
                return submitted.rid
            if retry is not None and not attach:
                trace = idempotency_key(shard_of(request.rid), retry.digest)
                await self._redis.set(trace, request.rid, px=retry.ttl_ms)
        except REDIS_DOWN as error:
            self._spawn(self._cancel(request.rid), _ABANDON)  # its reply may be all that was lost
            raise self._reachability.error() from error
        return None

    async def _confirmed(self, stream: Stream, confirmed: asyncio.Future[None]) -> Stream:
        """The stream, once its task has said so; who gives up waiting has left it."""
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                await self._reachability.answer(confirmed)
        except TimeoutError:
            self.leave(stream)
            raise self._reachability.error() from None
        except (asyncio.CancelledError, RedisUnavailable):
            self.leave(stream)
            raise
        return stream

    async def _join(self, stream: Stream, joined: asyncio.Future[None] | None = None) -> None:
        follower = Follower(stream, self._queue, self._metrics)
        async with self._listen(stream.request.rid) as feed:
            if joined is not None:
                joined.set_result(None)
            await follower.catch_up()
            await follower.follow(feed)

    @asynccontextmanager
    async def _listen(self, rid: str) -> AsyncIterator[Feed]:
        """A confirmed feed, counted, so that we can tell our own subscription from other pods'."""
        self._listening[rid] += 1
        try:
            async with self._subscriber.listen(channel_name(rid), timeout=ACCEPT_TIMEOUT_S) as feed:
                yield feed
        finally:
            self._listening[rid] -= 1
            if not self._listening[rid]:
                del self._listening[rid]

    async def _abandon(self, stream: Stream) -> None:
        rid = stream.request.rid
        if stream.request.grace_ms:
            await asyncio.sleep(stream.request.grace_ms / 1000)
        here = any(other.request.rid == rid and not other.left and not other.over for other in self._streams)
        if stream.ended or here:
            stream.closed = True
            return
        await self._cancel(rid, stream)

    async def _cancel(self, rid: str, stream: Stream | None = None) -> None:
        """Cancels a request unless other pods follow its stream; keeps trying while Redis is away."""
        until = time.monotonic() + CANCEL_RETRY_S
        while True:
            try:
                if stream is None or not await self._heard_elsewhere(rid):
                    await self._queue.cancel(rid)
                else:
                    stream.closed = True
                return
            except REDIS_DOWN:
                if time.monotonic() > until:
                    log.warning("a request could not be cancelled", rid=rid)
                    return
            await asyncio.sleep(random.uniform(0.2, 1.0))

    async def _heard_elsewhere(self, rid: str) -> bool:
        """Whether another pod follows the stream: subscribers of its channel besides our one connection."""
        counts = await self._redis.pubsub_numsub(channel_name(rid))
        subscribers: int = counts[0][1]
        return subscribers > (1 if self._listening[rid] else 0)
