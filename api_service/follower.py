"""Follows one request from channel and log until its terminal record: in order, nothing twice, nothing missing.

In: a feed of the channel and the log. Out: records pushed into a `Stream`. The log is the truth: it is read after
every Resync, on every gap in the sequence and after silence. When Redis lost the request, it is queued again with
what is held.
"""

from __future__ import annotations

import time

import msgspec
import structlog

from api_service.chunks import terminal_error
from api_service.metrics import Metrics
from api_service.stream import Stream
from shared.channel import Feed
from shared.connections import REDIS_DOWN
from shared.errors import DeadlineExceeded, EngineFailure, RedisUnavailable
from shared.messages import Record, decode_record
from shared.queue import RequestQueue

__all__ = ["Follower"]

SILENCE_S = 1.5
OUTAGE_LIMIT_S = 60.0
"""A stream waits this long for Redis to come back, then ends with an error that can be resumed from."""
DEADLINE_SLACK_S = 2.0
"""Workers drop late requests; the pod does it only when no worker did."""
_PAGE = 1000

log = structlog.get_logger(__name__)


class Follower:
    """The relay of one stream. Runs in a task of its own, so that no client's going away interrupts a Redis reply."""

    def __init__(self, stream: Stream, queue: RequestQueue, metrics: Metrics, deadline_s: float | None = None) -> None:
        """`deadline_s`: seconds from now in which the request must have been started."""
        self._stream = stream
        self._queue = queue
        self._metrics = metrics
        self._started = time.monotonic()
        self._give_up = None if deadline_s is None else self._started + deadline_s + DEADLINE_SLACK_S
        self._token_at: float | None = None
        self._down_since: float | None = None
        self._silences = 0
        self._unfinished_logs = 0
        self._reasons: set[str] = set()

    async def follow(self, feed: Feed) -> None:
        """Returns when the stream is over."""
        feed.direct = self._take
        while not self._stream.over:
            item = await feed.get(SILENCE_S)
            if isinstance(item, bytes):
                self._silences = 0
                if not self.accept(item):
                    self._metrics.gap()
                    await self.catch_up()
                    self.accept(item)
            elif item is None:
                self._silences += 1
                await self._after_silence(self._silences)
            else:
                await self.catch_up()

    def _take(self, raw: bytes) -> bool:
        """Takes a record without a switch to this task, which is for what is more than that: the end of the stream, a
        gap, a record that cannot be read."""
        self._silences = 0
        try:
            return self.accept(raw) and not self._stream.over
        except msgspec.MsgspecError:
            return False

    def accept(self, raw: bytes) -> bool:
        """Takes a record that is due, drops one that was there before; False = records before it are missing."""
        stream, record = self._stream, decode_record(raw)
        if record.seq <= stream.last or stream.ended:
            return True
        if record.seq > stream.last + 1:
            return False
        stream.push(raw, record)
        if stream.owned:
            self._measure(record)
        return True

    async def catch_up(self) -> bool:
        """Reads the log after the last record; False while Redis cannot be reached."""
        rid, stream = self._stream.request.rid, self._stream
        try:
            while not stream.ended:
                page = await self._queue.read_log(rid, after=stream.last, limit=_PAGE)
                for raw in page:
                    self.accept(raw)
                if len(page) < _PAGE:
                    break
        except REDIS_DOWN as error:
            self._redis_down(error)
            return False
        self._down_since = None
        return True

    async def _after_silence(self, silences: int) -> None:
        """The channel may have been cut, the request lost, or it simply waits its turn."""
        before = self._stream.last
        if not await self.catch_up() or self._stream.last > before:
            return
        try:
            known = await self._queue.position(self._stream.request.rid) is not None
            if not known or silences & (silences - 1) == 0:  # ever more rarely: is its queue entry still there?
                await self._recover(known)
            if self._give_up is not None and time.monotonic() > self._give_up and before < 0:
                await self._give_up_waiting()
        except REDIS_DOWN as error:
            self._redis_down(error)

    async def _recover(self, known: bool) -> None:
        stream, request = self._stream, self._stream.request
        state = None if known else await self._queue.state(request.rid)
        if state is not None and state.state == "done":
            await self._read_finished_log()
        elif stream.left and not request.grace_ms:
            stream.closed = True
        elif await self._queue.restore(request, stream.raw):
            log.warning("redis had lost a request; queued again", rid=request.rid, records=len(stream.raw))
            self._metrics.restored()

    async def _read_finished_log(self) -> None:
        """The terminal record was written between our two looks, or the log is gone although the request is not."""
        if await self.catch_up() and not self._stream.ended:
            self._unfinished_logs += 1
            if self._unfinished_logs > 1:
                self._stream.fail(EngineFailure("The rest of this stream was lost."))

    async def _give_up_waiting(self) -> None:
        rid = self._stream.request.rid
        state = await self._queue.state(rid)
        if state is not None and state.epoch == 0 and await self._queue.cancel(rid):
            self._stream.fail(DeadlineExceeded("The request was not started before its deadline."))
            if self._stream.owned:
                self._metrics.ended(self._stream.request.model, "error", time.monotonic() - self._started)

    def _redis_down(self, error: Exception) -> None:
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            log.warning("a stream waits for redis", rid=self._stream.request.rid, error=str(error))
        elif now - self._down_since > OUTAGE_LIMIT_S and not self._stream.over:
            self._metrics.cut("outage")
            self._stream.fail(
                RedisUnavailable("The queue cannot be reached. Resume this stream later.", retry_after=5.0)
            )

    def _measure(self, record: Record) -> None:
        now, model = time.monotonic(), self._stream.request.model
        said = False
        for delta in record.deltas:
            said = said or bool(delta.token_ids)
            if delta.finish_reason is not None:
                self._reasons.add(delta.finish_reason)
        if said:
            if self._token_at is None:
                self._metrics.first_token(model, now - self._started)
            else:
                self._metrics.next_token(model, now - self._token_at)
            self._token_at = now
        if record.end is not None:
            self._metrics.ended(model, self._reason(record), now - self._started)

    def _reason(self, record: Record) -> str:
        """One reason a request: length when any choice hit its limit."""
        error = terminal_error(record)
        if error is not None:
            return "abort" if error.code == "request_cancelled" else "error"
        return "length" if "length" in self._reasons else "stop"
