"""Fair turn against a plain model, over a real Redis: whoever asks, for however much room, gets the next request of the
share with the least virtual time; what came just now is shared by the workers with empty seats; every request is given
exactly once, also while the index is lost again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from shared import keys
from shared.claims import Acquired, ClaimQueue, Commit, Consumer, ReplyKind
from shared.connections import blocking_client, command_client
from shared.queue import RequestQueue
from tests.support.machines import run_machine
from tests.support.records import end_record, make_request
from tests.support.redis_server import RedisServer
from tests.support.turn_model import TurnModel
from tests.support.wait import eventually

_T = TypeVar("_T")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}
PLACE = (0, "tiny", "interactive")
QUEUE, ROOM = keys.queue_key(*PLACE), keys.room_key(0, "tiny")
WORKERS = 3
SHARED_MS = 30
"""For so long a request counts as one that came just now."""
FAR = 4_000_000_000_000
"""A moment in Redis's time that no test reaches: what is named after it always came just now."""


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
            ClaimQueue(self.redis, self.blocking, Consumer(f"w{i}", "tiny", lease_ms=3_600_000)) for i in range(WORKERS)
        ]
        for worker in self.workers:
            self.run(worker.ensure_group())
        self.model = TurnModel(WEIGHTS)
        self.rush = False
        self.claims: list[Held] = []
        self.running = [set[str]() for _ in self.workers]
        self.seen: dict[int, int] = {}
        """Seats of each worker that was seen lately: empty ones and what it ran."""

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(call)

    def teardown(self) -> None:
        self.run(self.redis.aclose())
        self.run(self.blocking.aclose())
        self.runner.close()

    @rule(
        share=st.sampled_from(sorted(WEIGHTS)),
        prompt=st.integers(1, 40),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
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
            self.model.arrives(request, young=self.rush)

    @initialize(rush=st.booleans())
    def begin(self, rush: bool) -> None:
        if rush:
            self.rush_begins()

    @precondition(lambda self: not self.rush)
    @rule()
    def rush_begins(self) -> None:
        """All that is submitted from now on comes just now, for however long this machine takes to look."""
        self.run(self._wait_until_old())
        last = self.run(self.redis.xadd(QUEUE, {"rid": "none"}, id=f"{FAR}-1"))
        self.run(self.redis.xdel(QUEUE, last))  # the stream's next ids follow its last one
        self.rush = True

    @precondition(lambda self: self.rush)
    @rule(sure=st.integers(0, 3))
    def rush_is_over(self, sure: int) -> None:
        """Those that wait are cancelled, the others finish, and ids are those of the clock again."""
        if sure < 3:
            return
        for share in WEIGHTS:
            while self.model.waiting[share]:
                self.cancel_waiting(share, 0)
        for one in self.claims:
            self.finish(one, 0.5, 0.5)
        self.run(self.redis.delete(QUEUE))
        self.run(self.workers[0].ensure_group())
        self.rush = False

    async def _wait_until_old(self) -> None:
        """Until nobody has a first claim to what was submitted outside of a rush."""
        newest = [int(entry.split(b"-")[0]) for entry, _ in await self.redis.xrevrange(QUEUE)]
        arrived = max((ms for ms in newest if ms < FAR), default=0)

        async def is_old() -> bool:
            seconds, micros = await self.redis.time()
            return seconds * 1000 + micros // 1000 > arrived + SHARED_MS

        await eventually(is_old, interval=0.002)

    @rule(target=held, which=st.integers(0, WORKERS - 1), room=st.integers(1, 9))
    def take(self, which: int, room: int) -> Any:
        self.run(self._wait_until_old())
        return multiple(*self._take(which, room))

    def _take(self, which: int, room: int) -> list[Held]:
        worker = self.workers[which]
        empty = {w: max(0, seats - len(self.running[w])) for w, seats in self.seen.items() if w != which}
        self.run(self.redis.delete(*(keys.own_bell_key(0, "tiny", f"w{w}") for w in range(WORKERS))))
        entries = self.run(worker.read(room, 0))
        taken = self.model.taken([entry.rid for entry in entries], room, list(empty.values()))
        acquired = self.run(worker.acquire(entries))
        assert [one.request for one in acquired] == [request for request, _ in taken]
        self.running[which] |= {request.rid for request, _ in taken}
        left = room - sum(request.num_choices for request, _ in taken)
        self.seen[which] = max(0, left) + len(self.running[which])
        self._check_room(which)
        if left > 0 and self.model.num_waiting:
            bells = [keys.own_bell_key(0, "tiny", f"w{w}") for w in range(WORKERS)]
            rung = [empty[w] for w, bell in enumerate(bells) if self.run(self.redis.exists(bell))]
            assert rung == [max(empty.values())], "who has most seats is woken for the rest"
        claims = [Held(worker, one, cost) for one, (_, cost) in zip(acquired, taken, strict=True)]
        self.claims += claims
        return claims

    def _check_room(self, which: int) -> None:
        """What the others will see of it; and it will have been just now, however slow this machine is."""
        value = self.run(self.redis.hget(ROOM, f"w{which}"))
        assert value.split()[0] == b"%d" % self.seen[which]
        self.run(self.redis.hset(ROOM, f"w{which}", f"{self.seen[which]} {FAR}"))

    @rule(target=held, rooms=st.lists(st.integers(1, 9), min_size=WORKERS, max_size=WORKERS), first=st.integers(0, 5))
    def all_take(self, rooms: list[int], first: int) -> Any:
        """Whatever each leaves to the others, together they leave nothing while a seat is empty."""
        self.run(self._wait_until_old())
        claims: list[Held] = []
        idle = 0
        while idle <= 2 * WORKERS:  # all have seen what room the others have now
            which = first % WORKERS
            got = self._take(which, rooms[which]) if rooms[which] > 0 else []
            rooms[which] -= sum(one.acquired.request.num_choices for one in got)
            idle = 0 if got else idle + 1
            first += 1
            claims += got
        assert not self.model.num_waiting or max(rooms) <= 0
        return multiple(*claims)

    @rule(which=st.integers(0, WORKERS - 1), how=st.sampled_from(["silent", "long ago", "lost"]))
    def is_seen_no_more(self, which: int, how: str) -> None:
        """One worker hangs, has long been gone, or all that is known of the workers is lost."""
        if how == "lost":
            self.run(self.redis.delete(ROOM))
            self.seen.clear()
        elif which in self.seen:
            seconds, _ = self.run(self.redis.time())
            at = seconds * 1000 - 10_000 if how == "silent" else 1
            self.run(self.redis.hset(ROOM, f"w{which}", f"{self.seen.pop(which)} {at}"))

    @rule(which=st.integers(0, WORKERS - 1))
    def leave(self, which: int) -> None:
        self.run(self.workers[which].leave())
        self.seen.pop(which, None)

    @rule(one=held, part=st.floats(0, 1), cached=st.floats(0, 1))
    def finish(self, one: Held, part: float, cached: float) -> None:
        request = one.acquired.request
        if request.rid in self.model.ended:
            return
        completion, found = int(part * request.max_output_tokens), int(cached * request.prompt_tokens)
        record = end_record(0, request.prompt_tokens, completion)
        item = Commit(one.acquired.claim, 0, record, True, request.prompt_tokens, completion, found)
        assert [reply.kind for reply in self.run(one.worker.commit([item]))] == [ReplyKind.OK]
        self.model.ends(request, one.charged, completion, found)
        self.running[self.workers.index(one.worker)].remove(request.rid)

    @rule(share=st.sampled_from(sorted(WEIGHTS)), which=st.integers(0, 3))
    def cancel_waiting(self, share: str, which: int) -> None:
        if which < len(self.model.waiting[share]):
            assert self.run(self.pod.cancel(self.model.leaves(share, which).rid))

    @rule(lost=st.sampled_from(["wait", "both"]))
    def lose_index(self, lost: str) -> None:
        """Arrival and virtual times are kept elsewhere, so the order that comes back is the same."""
        self.model.indexed.clear()
        names = [keys.wait_key(*PLACE), keys.turn_key(*PLACE)]
        self.run(self.redis.delete(*names[: 1 if lost == "wait" else 2]))
        if lost == "both":
            self.model.without_turn = {name for name, queue in self.model.waiting.items() if queue}

    @invariant()
    def every_request_is_somewhere(self) -> None:
        depth = self.run(self.pod.depth("tiny"))
        assert (depth.waiting, depth.running) == (self.model.num_waiting, self.model.num_open - self.model.num_waiting)


def _check(server: RedisServer, examples: int, steps: int) -> None:
    run_machine(lambda: TurnMachine(server), examples, steps)


@pytest.mark.timeout(600)  # a failure takes its time to shrink
def test_turns_are_fair_and_nothing_is_lost_or_given_twice(redis_server: RedisServer) -> None:
    _check(redis_server, 25, 40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_turns_are_fair_for_long(redis_server: RedisServer) -> None:
    _check(redis_server, 400, 80)
