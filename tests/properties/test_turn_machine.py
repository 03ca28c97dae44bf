"""Fair turn against a plain model, over a real Redis: whoever asks, for however much room, gets the next request of the
share with the least virtual time; every request is given exactly once, also while the index is lost again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from shared import keys
from shared.claims import Acquired, ClaimQueue, Commit, ReplyKind
from shared.connections import blocking_client, command_client
from shared.messages import GenerateRequest
from shared.queue import RequestQueue
from tests.support.machines import run_machine
from tests.support.records import end_record, make_request
from tests.support.redis_server import RedisServer

_T = TypeVar("_T")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}
PLACE = (0, "tiny", "interactive")
FIRST_GUESS, LEARNING = 128.0, 0.2
"""What docs/redis_protocol.md promises of the guess at an answer's length."""


@dataclass
class Share:
    virtual: float = 0.0
    usual: float = FIRST_GUESS


@dataclass(eq=False)
class Held:
    worker: ClaimQueue
    acquired: Acquired
    charged: float


class TurnMachine(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        client = server.client()
        client.flushall()
        client.close()
        self.runner = asyncio.Runner()
        self.redis, self.blocking = command_client(server.url, max_connections=2), blocking_client(server.url)
        self.pod = RequestQueue(self.redis)
        self.workers = [
            ClaimQueue(self.redis, self.blocking, consumer=f"w{i}", model="tiny", lease_ms=3_600_000) for i in range(2)
        ]
        for worker in self.workers:
            self.run(worker.ensure_group())
        self.shares = {name: Share() for name in WEIGHTS}
        self.floor = 0.0
        self.waiting: dict[str, list[GenerateRequest]] = {name: [] for name in WEIGHTS}
        """In the order in which they must come."""
        self.without_turn: set[str] = set()
        """Shares whose turn was lost: if they send or end anything before it is back, they start anew."""
        self.indexed: set[str] = set()
        """Waiting requests that the index knows: all of them, unless it was lost since the last take."""
        self.given: set[str] = set()
        self.ended: set[str] = set()

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(call)

    def teardown(self) -> None:
        self.run(self.redis.aclose())
        self.run(self.blocking.aclose())
        self.runner.close()

    @rule(
        share=st.sampled_from(sorted(WEIGHTS)),
        prompt=st.integers(1, 40),
        choices=st.integers(1, 3),
        max_tokens=st.integers(1, 200),
        priority=st.sampled_from([0, 0, 0, -3, 7]),
        times=st.integers(1, 4),
    )
    def submit(self, share: str, prompt: int, choices: int, max_tokens: int, priority: int, times: int) -> None:
        for _ in range(times):
            request = make_request(
                share=share,
                weight=WEIGHTS[share],
                prompts=((1,) * prompt,),
                n=choices,
                max_tokens=max_tokens,
                priority=priority,
            )
            assert self.run(self.pod.submit(request, max_waiting=10_000, max_waiting_tokens=10**9)).created
            if not self.waiting[share] or share in self.without_turn:
                self.shares[share].virtual = max(self.shares[share].virtual, self.floor)
                self.without_turn.discard(share)
            self.indexed.add(request.rid)
            self.waiting[share].append(request)
            self.waiting[share].sort(key=lambda one: one.priority)  # stable: then by arrival

    @rule(target=held, which=st.integers(0, 1), room=st.integers(1, 6))
    def take(self, which: int, room: int) -> Any:
        worker, taken = self.workers[which], []
        # As if alone: who of several gets what came just now is a matter of milliseconds (test_shared_room.py).
        self.run(self.redis.delete(keys.room_key(0, "tiny")))
        entries = self.run(worker.read(room, 0))
        self.without_turn.clear()
        self.indexed = {one.rid for queue in self.waiting.values() for one in queue}
        for entry in entries:
            assert entry.rid not in self.given, "given twice"
            self.given.add(entry.rid)
            request, charged = self._expected_next(entry.rid)
            room -= request.num_choices
            taken.append((request, charged))
        assert room <= 0 or not any(self.waiting.values()), "room was left and requests wait"
        assert not entries or room > -3, "more than the last one's choices beyond the room"
        acquired = self.run(worker.acquire(entries))
        assert [one.request for one in acquired] == [request for request, _ in taken]
        claims = [Held(worker, one, cost) for one, (_, cost) in zip(acquired, taken, strict=True)]
        return multiple(*claims)

    def _expected_next(self, rid: str) -> tuple[GenerateRequest, float]:
        """The request, which must be the first of a share with the least virtual time; and what it was charged."""
        backlogged = [name for name, queue in self.waiting.items() if queue]
        [name] = [name for name in backlogged if any(one.rid == rid for one in self.waiting[name])]
        share = self.shares[name]
        assert share.virtual <= min(self.shares[other].virtual for other in backlogged) + 0.01
        request = self.waiting[name].pop(0)
        assert request.rid == rid, "out of order within its share"
        cost = request.prompt_tokens + min(request.max_output_tokens, share.usual * request.num_choices)
        self.floor = max(self.floor, share.virtual)
        share.virtual += cost / WEIGHTS[name]
        return request, cost

    @rule(one=held, part=st.floats(0, 1), cached=st.floats(0, 1))
    def finish(self, one: Held, part: float, cached: float) -> None:
        request = one.acquired.request
        if request.rid in self.ended:
            return
        self.ended.add(request.rid)
        completion, found = int(part * request.max_output_tokens), int(cached * request.prompt_tokens)
        record = end_record(0, request.prompt_tokens, completion)
        item = Commit(one.acquired.claim, 0, record, True, request.prompt_tokens, completion, found)
        assert [reply.kind for reply in self.run(one.worker.commit([item]))] == [ReplyKind.OK]
        share = self.shares[request.share]
        if not self.waiting[request.share] or request.share in self.without_turn:
            share.virtual = max(share.virtual, self.floor)
        real = request.prompt_tokens - found + completion
        share.virtual = max(0.0, share.virtual + (real - one.charged) / WEIGHTS[request.share])
        share.usual += LEARNING * (completion / request.num_choices - share.usual)

    @rule(share=st.sampled_from(sorted(WEIGHTS)), which=st.integers(0, 3))
    def cancel_waiting(self, share: str, which: int) -> None:
        if which < len(self.waiting[share]):
            request = self.waiting[share].pop(which)
            assert self.run(self.pod.cancel(request.rid))
            if self.waiting[share] and not any(one.rid in self.indexed for one in self.waiting[share]):
                self.without_turn.add(share)  # the last that the index knew of

    @rule(lost=st.sampled_from(["wait", "both"]))
    def lose_index(self, lost: str) -> None:
        """Arrival and virtual times are kept elsewhere, so the order that comes back is the same."""
        self.indexed.clear()
        names = [keys.wait_key(*PLACE), keys.turn_key(*PLACE)]
        self.run(self.redis.delete(*names[: 1 if lost == "wait" else 2]))
        if lost == "both":
            self.without_turn = {name for name, queue in self.waiting.items() if queue}

    @invariant()
    def every_request_is_somewhere(self) -> None:
        waiting = sum(map(len, self.waiting.values()))
        depth = self.run(self.pod.depth("tiny"))
        assert (depth.waiting, depth.running) == (waiting, len(self.given) - len(self.ended))


def _check(server: RedisServer, examples: int, steps: int) -> None:
    run_machine(lambda: TurnMachine(server), examples, steps)


@pytest.mark.timeout(600)  # a failure takes its time to shrink
def test_turns_are_fair_and_nothing_is_lost_or_given_twice(redis_server: RedisServer) -> None:
    _check(redis_server, 25, 40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_turns_are_fair_for_long(redis_server: RedisServer) -> None:
    _check(redis_server, 400, 80)
