"""What must be true after any disturbance: exact answers, whole logs, nothing left in the queue, and books that agree.

In: expected answers, what clients saw, a Redis. Out: assertion errors that say which stream differs in what. It reads
Redis with a client of its own and counts tokens in the logs, so it does not rely on the counters that it checks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import redis

from shared.keys import request_key
from shared.messages import Record, decode_record
from tests.support.chaos_load import Expected
from tests.support.redis_server import RedisServer
from tests.support.stack import Worker
from tests.support.stream_client import Outcome
from tests.support.wait import eventually, eventually_sync

__all__ = [
    "Books",
    "assert_exact",
    "busiest",
    "connected",
    "counts",
    "field_of",
    "held_by",
    "ledger",
    "problem",
    "queued",
    "read_log",
]

_COUNTED = ("prompt_tokens", "completion_tokens", "total_tokens")
SETTLE_S = 20.0


@contextlib.contextmanager
def connected(server: RedisServer) -> Iterator[redis.Redis]:
    client = server.client()
    try:
        yield client
    finally:
        client.close()


def counts(usage: dict[str, object] | None) -> dict[str, object]:
    """Without the cache hits, which may differ."""
    return {name: (usage or {}).get(name) for name in _COUNTED}


def problem(expected: Expected, outcome: Outcome | BaseException) -> str:
    """What is wrong with a client's stream; "" when it is exactly the undisturbed one."""
    if isinstance(outcome, BaseException):
        return f"{expected.load}: {outcome!r}"
    for name, got, wanted in (
        ("error", outcome.error, None),
        ("texts", outcome.texts, expected.texts),
        ("finish", outcome.finish, expected.finish),
        ("usage", counts(outcome.usage), counts(expected.usage)),
        ("ids of the stream", len(outcome.public_ids), 1),
        ("event ids that came twice", [i for i, n in Counter(outcome.ids).items() if n > 1], []),
    ):
        if got != wanted:
            return f"{outcome.rid}: {name} is {got!r}, not {wanted!r} (after {outcome.reconnects} reconnects)"
    return ""


def assert_exact(expected: Sequence[Expected], outcomes: Sequence[Outcome | BaseException]) -> None:
    """Every client has exactly the undisturbed answer."""
    wrong = [found for e, o in zip(expected, outcomes, strict=True) if (found := problem(e, o))]
    assert not wrong, "\n".join(wrong[:10])


def ledger(server: RedisServer) -> Counter[str]:
    """All tenants and days together."""
    sums: Counter[str] = Counter({"requests": 0, "prompt_tokens": 0, "completion_tokens": 0})
    with connected(server) as client:
        for key in client.scan_iter(match="*:ledger:*", count=1000):
            sums.update({name.decode(): int(value) for name, value in client.hgetall(key).items()})
    return sums


def queued(server: RedisServer) -> int:
    """Entries in all queue streams, waiting and running."""
    with connected(server) as client:
        return sum(client.xlen(queue) for queue in client.scan_iter(match="*:queue:*", count=1000))


def field_of(server: RedisServer, rid: str, name: str) -> str:
    """One field of a request's metadata, "" when it has none."""
    with connected(server) as client:
        value = client.hget(request_key(rid), name)
    return value.decode() if value is not None else ""


def held_by(server: RedisServer, worker: Worker, outcomes: Iterable[Outcome]) -> list[str]:
    """Requests that `worker` owns and that have not ended."""
    rids = [outcome.rid for outcome in outcomes if outcome.rid]
    return [
        rid
        for rid in rids
        if field_of(server, rid, "holder") == worker.worker_id and field_of(server, rid, "state") == "open"
    ]


def busiest(server: RedisServer, workers: Sequence[Worker], outcomes: Sequence[Outcome]) -> tuple[Worker, list[str]]:
    """The worker that owns most of them, with what it owns: which one took how many is chance."""
    held = [(worker, held_by(server, worker, outcomes)) for worker in workers]
    return max(held, key=lambda one: len(one[1]))


def read_log(server: RedisServer, rid: str) -> list[Record]:
    """The log of a request as it stands; AssertionError when a sequence number is missing or comes twice."""
    with connected(server) as client:
        [key] = client.scan_iter(match=f"*:log:{rid}", count=10_000)
        records = [decode_record(fields[b"d"]) for _, fields in client.xrange(key)]
    assert [record.seq for record in records] == list(range(len(records))), rid
    return records


def _finished_logs(server: RedisServer) -> dict[str, list[Record]]:
    """Logs of all requests that are kept, by rid; each must end with its one terminal record."""
    with connected(server) as client:
        rids = [key.decode().rsplit(":", 1)[1] for key in client.scan_iter(match="*:log:*", count=10_000)]
    logs = {rid: read_log(server, rid) for rid in rids}
    for rid, records in logs.items():
        assert [record.end is not None for record in records] == [False] * (len(records) - 1) + [True], rid
    return logs


@dataclass
class Books:
    """The ledger from now on, against what the logs hold and what the clients were told."""

    server: RedisServer
    before: Counter[str] = field(default_factory=Counter)
    known: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, server: RedisServer) -> Books:
        """From now on, when whatever an earlier test began is over."""
        eventually_sync(lambda: queued(server) == 0, SETTLE_S, interval=0.1, what="nothing of earlier tests runs")
        with connected(server) as client:
            known = {key.decode().rsplit(":", 1)[1] for key in client.scan_iter(match="*:log:*", count=10_000)}
        return cls(server, ledger(server), known)

    async def settle(self, outcomes: Iterable[Outcome], *, others: int = 0) -> dict[str, list[Record]]:
        """Waits until the queue is empty. Then the ledger must equal the tokens in the logs, each request's usage the
        tokens of its own log, and the clients' usage their requests'. `others`: requests at most that no client has a
        whole answer of (cancelled, refused). Returns the logs of the requests since `open`.
        """
        await eventually(lambda: queued(self.server) == 0, SETTLE_S, interval=0.1, what="no entry is left in a queue")
        logs = {rid: log for rid, log in _finished_logs(self.server).items() if rid not in self.known}
        sums = Counter({"requests": len(logs), "prompt_tokens": 0, "completion_tokens": 0})
        for rid, records in logs.items():
            end = records[-1].end
            assert end is not None
            assert end.usage.completion_tokens == _tokens(records), f"{rid}: usage and log differ"
            sums["prompt_tokens"] += end.usage.prompt_tokens
            sums["completion_tokens"] += end.usage.completion_tokens
        billed = ledger(self.server)
        difference = {name: billed[name] - self.before[name] for name in sums}
        assert difference == dict(sums), f"the ledger grew by {difference}, the logs by {dict(sums)}"
        told = {outcome.rid: outcome.usage for outcome in outcomes if outcome.usage is not None}
        for rid, usage in told.items():
            end = logs[rid][-1].end
            assert end is not None
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
                end.usage.prompt_tokens,
                end.usage.completion_tokens,
            )
        assert len(logs) - len(told) <= others, f"requests that nobody received: {sorted(set(logs) - set(told))}"
        return logs


def _tokens(records: Sequence[Record]) -> int:
    return sum(len(delta.token_ids) for record in records for delta in record.deltas)
