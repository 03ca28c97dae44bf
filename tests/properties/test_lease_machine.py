"""The queue against a plain model, over a real Redis: whatever workers die, pause, come back or race, only the last
owner writes, seq has no gap, every request ends at most once, and the ledger is what was committed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from shared import keys
from shared.claims import ClaimQueue, Commit, Consumer, Entry, ReplyKind
from shared.connections import blocking_client, command_client
from shared.messages import decode_record
from shared.queue import RequestQueue
from tests.support.lease_model import Held, Model, Worker
from tests.support.machines import run_machine
from tests.support.records import end_record, make_request, token_record
from tests.support.redis_server import RedisServer

_T = TypeVar("_T")
MAX_TRIES = 2
WORKERS = 3
LEASE_MS = 3_600_000
"""So long that only the `fall_silent` rule ends a lease."""


which_worker = st.integers(0, WORKERS - 1)
which_claim = st.integers(0, 15)
"""Counted from the last one, as far as there are any."""


class LeaseMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        client = server.client()
        client.flushall()
        client.close()
        self.runner = asyncio.Runner()
        self.models: dict[str, Model] = {}
        self.held: list[Held] = []
        """Every claim that anybody ever had. No bundle: how many there are is for the real queue to say, and a replay
        in which it comes out otherwise would leave Hypothesis with other choices than the run had."""
        self.count = 0
        self.redis = command_client(server.url, max_connections=2)
        self.blocking = blocking_client(server.url)
        self.pod = RequestQueue(self.redis)
        self.workers = [self._new_worker() for _ in range(WORKERS)]

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(call)

    def teardown(self) -> None:
        self.run(self.redis.aclose())
        self.run(self.blocking.aclose())
        self.runner.close()

    def _claim(self, which: int) -> Held | None:
        return self.held[-1 - which % len(self.held)] if self.held else None

    def _new_worker(self) -> Worker:
        self.count += 1
        limits = {"lease_ms": LEASE_MS, "max_tries": MAX_TRIES}
        queue = ClaimQueue(self.redis, self.blocking, Consumer(f"w{self.count}", "tiny", **limits))
        self.run(queue.ensure_group())
        return Worker(self.count, queue)

    @rule(which=which_worker)
    def kill_worker(self, which: int) -> None:
        """It goes silent with all it had, and a new process takes its place; its claims may still be tried."""
        for klass in keys.CLASSES:
            self._age(klass, "-", "+", f"w{self.workers[which].number}")
        self.workers[which] = self._new_worker()

    @rule(which=which_claim)
    def pause(self, which: int) -> None:
        """One request is not renewed for longer than a lease; its owner may come back."""
        if (held := self._claim(which)) is None:
            return
        entry = held.acquired.claim.entry_id.decode()
        self._age(self.models[held.acquired.claim.rid].klass, entry, entry, None)

    def _age(self, klass: str, first: str, last: str, consumer: str | None) -> None:
        name = keys.queue_key(0, "tiny", klass)
        for item in self.run(self.redis.xpending_range(name, keys.GROUP, first, last, 100, consumer)):
            one = [item["message_id"]]
            self.run(self.redis.xclaim(name, keys.GROUP, item["consumer"], 0, one, idle=2 * LEASE_MS, justid=True))

    @rule(target=requests, classes=st.lists(st.sampled_from(keys.CLASSES), min_size=1, max_size=3))
    def submit(self, classes: list[str]) -> Any:
        for klass in classes:
            request = make_request(klass=klass, tenant="t")
            assert self.run(self.pod.submit(request, max_waiting=1000, max_waiting_tokens=100_000)).created
            self.models[request.rid] = Model(request.rid, klass)
        return multiple(*list(self.models.values())[-len(classes) :])

    @rule(which=which_worker, count=st.integers(1, 3), acquires=st.integers(0, 5))
    def read(self, which: int, count: int, acquires: int) -> None:
        worker = self.workers[which]
        self._acquire(worker, self.run(worker.queue.read(count, 1)), bool(acquires))

    @rule(which=which_worker, count=st.integers(1, 3), acquires=st.integers(0, 5))
    def reclaim(self, which: int, count: int, acquires: int) -> None:
        worker = self.workers[which]
        taken = self.run(worker.queue.reclaim(count))
        if any(1 <= self.models[entry.rid].tries < MAX_TRIES for entry in taken):
            assert len(taken) == 1, "a suspect comes alone"
        self._acquire(worker, taken, bool(acquires))

    def _acquire(self, worker: Worker, entries: list[Entry], now: bool) -> None:
        """What was delivered, with what is left from before; or later, when `now` is false."""
        worker.unread += entries
        if not now:
            return
        entries, worker.unread = worker.unread, []
        owners = {entry.rid: self.models[entry.rid].owner for entry in entries}
        acquired = {one.claim.rid: one for one in self.run(worker.queue.acquire(entries))}
        for rid in owners:
            model = self.models[rid]
            if rid not in acquired:
                self._ended_by_acquire(model)
                continue
            one = acquired[rid]
            assert not model.done
            assert not model.cancelled
            assert model.tries < MAX_TRIES
            assert one.records == model.log
            assert one.claim.epoch == model.epoch + 1
            model.epoch, model.owner, model.tries = one.claim.epoch, (worker.number, one.claim.epoch), model.tries + 1
            assert one.tries == model.tries
        self.held += [Held(worker, one) for one in acquired.values()]

    def _ended_by_acquire(self, model: Model) -> None:
        """Left out: ended before, ended now for a reason the model knows, or put back; never silently lost."""
        state = self.run(self.pod.state(model.rid))
        assert state is not None
        if state.state == "done" and not model.done:
            assert model.cancelled or model.tries >= MAX_TRIES
            model.done = True
            model.log.append(None)

    @rule(which=which_claim, offset=st.sampled_from([0, 0, 0, 0, -1, 1]), last=st.integers(0, 5))
    def commit(self, which: int, offset: int, last: int) -> None:
        if (held := self._claim(which)) is None:
            return
        model, end = self.models[held.acquired.claim.rid], last == 5
        seq = max(0, len(model.log) + offset)
        payload = end_record(seq, 4, model.completion_tokens) if end else token_record(seq)
        item = Commit(held.acquired.claim, seq, payload, end, 4, model.completion_tokens)
        [reply] = self.run(held.worker.queue.commit([item]))
        assert reply.kind is self._expected(held, seq)
        if reply.kind is ReplyKind.OK:
            model.log.append(payload)
            model.tries = 0
            model.done = end
            model.completion_tokens += not end
        if reply.kind is not ReplyKind.FENCED:
            assert reply.next == len(model.log)

    def _expected(self, held: Held, seq: int | None = None) -> ReplyKind:
        model = self.models[held.acquired.claim.rid]
        if model.owner != (held.worker.number, held.acquired.claim.epoch):
            return ReplyKind.FENCED
        if seq is not None and seq < len(model.log):
            return ReplyKind.DUP
        if model.done:
            return ReplyKind.CLOSED
        return ReplyKind.GAP if seq is not None and seq > len(model.log) else ReplyKind.OK

    @rule(which=which_claim)
    def renew(self, which: int) -> None:
        if (held := self._claim(which)) is None:
            return
        [reply] = self.run(held.worker.queue.renew([held.acquired.claim]))
        assert reply.kind is self._expected(held)
        if reply.kind is ReplyKind.OK:
            assert reply.cancelled == self.models[held.acquired.claim.rid].cancelled

    @rule(which=which_claim, times=st.integers(1, 2))
    def hand_back(self, which: int, times: int) -> None:
        if (held := self._claim(which)) is None:
            return
        model = self.models[held.acquired.claim.rid]
        owns = self._expected(held) is ReplyKind.OK
        for _ in range(times):  # a replay is harmless
            self.run(held.worker.queue.hand_back([held.acquired.claim]))
        if owns:
            model.owner = None
            model.tries = max(0, model.tries - 1)

    @rule(which=which_claim, sure=st.integers(0, 5))
    def bury(self, which: int, sure: int) -> None:
        if (held := self._claim(which)) is None:
            return
        if sure < 5 and self._expected(held) is ReplyKind.OK:
            return  # seldom, or nothing would be left to run
        expected = self._expected(held)
        assert self.run(held.worker.queue.bury(held.acquired.claim, "engine_failure", "It broke.")) is expected
        if expected is ReplyKind.OK:
            model = self.models[held.acquired.claim.rid]
            model.done = True
            model.log.append(None)

    @rule(model=requests, sure=st.integers(0, 3))
    def cancel(self, model: Model, sure: int) -> None:
        if sure < 3 and not model.done:
            return
        assert self.run(self.pod.cancel(model.rid)) == (not model.done)
        if model.done:
            return
        if model.owner is None:
            model.done = True
            model.log.append(None)
        else:
            model.cancelled = True

    @invariant()
    def logs_are_what_was_committed(self) -> None:
        for model in self.models.values():
            stored = self.run(self.pod.read_log(model.rid))
            assert len(stored) == len(model.log)
            for seq, (record, expected) in enumerate(zip(stored, model.log, strict=True)):
                decoded = decode_record(record)
                assert decoded.seq == seq
                assert expected in (None, record)
                assert (decoded.end is not None) == (model.done and seq == len(stored) - 1)
            state = self.run(self.pod.state(model.rid))
            assert state is not None
            assert (state.state, state.next) == ("done" if model.done else "open", len(model.log))

    @invariant()
    def the_ledger_is_the_sum_of_terminal_records(self) -> None:
        totals = {b"requests": 0, b"prompt_tokens": 0, b"completion_tokens": 0}
        for name in self.run(_all(self.redis, "*:ledger:*")):
            for field_name, value in self.run(self.redis.hgetall(name)).items():
                totals[field_name] += int(value)
        ended = [model for model in self.models.values() if model.done]
        assert totals == {
            b"requests": len(ended),
            b"prompt_tokens": 4 * len(ended),
            b"completion_tokens": sum(model.completion_tokens for model in ended),
        }

    @invariant()
    def every_open_request_has_one_entry_and_no_ended_one_has(self) -> None:
        names = [keys.queue_key(0, "tiny", klass) for klass in keys.CLASSES]
        rows = [row for name in names for row in self.run(self.redis.xrange(name))]
        assert sorted(fields[b"rid"].decode() for _, fields in rows) == sorted(
            model.rid for model in self.models.values() if not model.done
        )
        depth = self.run(self.pod.depth("tiny"))
        assert depth.waiting + depth.running == len(rows)


async def _all(redis: Any, pattern: str) -> list[bytes]:
    return [name async for name in redis.scan_iter(match=pattern, count=1000)]


def _check(server: RedisServer, examples: int, steps: int) -> None:
    run_machine(lambda: LeaseMachine(server), examples, steps)


@pytest.mark.timeout(600)  # a failure takes its time to shrink
def test_the_queue_keeps_its_promises(redis_server: RedisServer) -> None:
    _check(redis_server, 30, 40)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_queue_keeps_its_promises_for_long(redis_server: RedisServer) -> None:
    _check(redis_server, 400, 60)
