"""Steps that queue tests are made of: submit, take, say a token, finish. Each asserts what must always hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from shared.claims import Acquired, ClaimQueue, Commit, ReplyKind
from shared.messages import GenerateRequest, Record, decode_record
from shared.queue import RequestQueue
from tests.support.records import end_record, make_request, token_record

__all__ = ["MakeWorker", "finish", "log_of", "reclaim_all", "say", "submit", "take_one"]

MakeWorker = Callable[..., Awaitable[ClaimQueue]]


async def submit(queue: RequestQueue, **changes: Any) -> GenerateRequest:
    """A request that is in the queue."""
    request = make_request(**changes)
    submitted = await queue.submit(request, max_waiting=100_000, max_waiting_tokens=10_000_000)
    assert submitted.created
    assert submitted.rid == request.rid
    return request


async def take_one(worker: ClaimQueue) -> Acquired:
    """The next waiting request, acquired."""
    [acquired] = await worker.acquire(await worker.read(1, 1000))
    return acquired


async def say(worker: ClaimQueue, acquired: Acquired, *seqs: int) -> list[ReplyKind]:
    """Commits one-token records; the kinds of the replies."""
    replies = await worker.commit([Commit(acquired.claim, seq, token_record(seq)) for seq in seqs])
    return [reply.kind for reply in replies]


async def finish(worker: ClaimQueue, acquired: Acquired, seq: int) -> ReplyKind:
    """Commits the terminal record `seq` with as many completion tokens as records before it."""
    tokens = acquired.request.prompt_tokens
    record = end_record(seq, tokens, seq)
    item = Commit(acquired.claim, seq, record, end=True, prompt_tokens=tokens, completion_tokens=seq)
    [reply] = await worker.commit([item])
    return reply.kind


async def log_of(queue: RequestQueue, rid: str) -> list[Record]:
    """All records; AssertionError unless seq has no gap and only the last one may be terminal."""
    records = [decode_record(record) for record in await queue.read_log(rid)]
    assert [record.seq for record in records] == list(range(len(records)))
    assert not any(record.end for record in records[:-1])
    return records


async def reclaim_all(worker: ClaimQueue, count: int = 64) -> list[Acquired]:
    """One reclaim, acquired; [] when there was nothing (yet)."""
    return await worker.acquire(await worker.reclaim(count))
