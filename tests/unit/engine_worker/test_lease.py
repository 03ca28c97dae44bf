"""What the answers to a renewal do to the jobs. The answers are given here; Redis gives them in the contract tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from engine_worker.engine_loop import EngineLoop
from engine_worker.faults import Faults
from engine_worker.jobs import Job
from engine_worker.lease import Lease
from engine_worker.outbox import Outbox
from shared.claims import Claim, RenewReply, ReplyKind
from shared.text.token_bytes import TokenBytes
from tests.support import toy_tokenizers
from tests.support.records import make_request
from tests.support.wait import eventually
from tests.unit.engine_worker.test_engine_loop import CountingEngine

TOKENS = TokenBytes.from_tokenizer_json(toy_tokenizers.byte_level().to_str().encode())


class Answering:
    """Answers every renewal with the same kind."""

    def __init__(self, kind: ReplyKind) -> None:
        self.kind = kind
        self.asked = 0

    async def renew(self, claims: Sequence[Claim]) -> list[RenewReply]:
        self.asked += 1
        return [RenewReply(self.kind, False) for _ in claims]


@pytest.mark.parametrize(
    ("kind", "ending", "kept"),
    [
        (ReplyKind.OK, False, True),
        (ReplyKind.FENCED, False, False),
        (ReplyKind.FENCED, True, False),
        (ReplyKind.GONE, True, False),
        (ReplyKind.CLOSED, False, False),
        (ReplyKind.CLOSED, True, True),  # by our own last record, whose answer is on its way
    ],
)
async def test_a_job_is_dropped_when_it_is_no_longer_ours(kind: ReplyKind, ending: bool, kept: bool) -> None:
    engine, queue = EngineLoop(CountingEngine(), Faults()), Answering(kind)
    outbox = Outbox({0: queue}, engine, freed=asyncio.Event(), backlog_limit=100)  # type: ignore[dict-item]
    request = make_request()
    job = Job(Claim(request.rid, b"1-0", "queue", 1), request, TOKENS)
    outbox.add(job)
    if ending:
        job.cancel()
        job.seal()
    lease = Lease({0: queue}, outbox, engine, lease_ms=1000, step_limit_ms=1000)  # type: ignore[dict-item]
    renewing = asyncio.create_task(lease.run())
    lease.renew_now()
    await eventually(lambda: queue.asked, what="a renewal")
    renewing.cancel()
    await asyncio.wait([renewing])
    assert (outbox.jobs.get(request.rid) is job) is kept
    assert sum(outbox.counters.values()) == (not kept)
