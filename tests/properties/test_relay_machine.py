"""The relay against a plain model, over a real Redis: whatever is cut, lost, repeated, fenced, forgotten or resumed,
every client gets the events after its cursor, each once and in order, one end, and never hangs.

The pods are real (relay, follower, subscriber, queue, stream writer) but for HTTP. The worker's side is the real
`ClaimQueue`, with tokens that are a function of their place; so is what each client must have in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from api_service import follower, relay
from api_service.chunks import BEFORE_OPENING
from api_service.metrics import Metrics
from api_service.reachability import Reachability
from api_service.registry_view import Snapshot
from api_service.relay import Relay
from api_service.settings import Settings
from shared import keys
from shared.channel import Subscriber
from shared.claims import Commit, ReplyKind
from shared.connections import blocking_client, command_client
from shared.errors import StreamExpired
from shared.queue import RequestQueue
from tests.support.machines import run_machine
from tests.support.records import make_request, token_record
from tests.support.redis_server import RedisServer
from tests.support.relay_model import LEASE_MS, Client, Truth, Workers, payload
from tests.support.wait import eventually

_T = TypeVar("_T")
PODS = 2
REQUESTS = 3
HANGS_S = 20.0
SILENCE_S = 0.02
LOST = (ReplyKind.FENCED, ReplyKind.GONE)


class RelayMachine(RuleBasedStateMachine):
    truths = Bundle("truths")
    clients = Bundle("clients")

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        with server.client() as client:
            client.flushall()
        self.runner = asyncio.Runner()
        self.url = server.url
        self.known: list[Truth] = []
        self.all_clients: list[Client] = []
        self.redis = command_client(self.url, max_connections=8)
        self.blocking = blocking_client(self.url)
        self.subscribers: list[Subscriber] = []
        self.pods = [self.run(self._new_pod()) for _ in range(PODS)]
        self.workers = Workers(self.redis, self.blocking, self.known)
        self.run(self.workers.start_another())

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(call)

    async def _new_pod(self) -> Relay:
        subscriber = Subscriber(self.url)
        self.subscribers.append(subscriber)
        queue = RequestQueue(self.redis)
        never_asked = Reachability(self.url)
        return Relay(queue, self.redis, subscriber, never_asked, Metrics(Snapshot), Settings(redis_url=self.url))

    @initialize(target=truths, length=st.integers(1, 10))
    def first(self, length: int) -> Truth:
        return self._submit(0, length)

    @precondition(lambda self: len(self.known) < REQUESTS)
    @rule(target=truths, pod=st.integers(0, PODS - 1), length=st.integers(1, 10))
    def submit(self, pod: int, length: int) -> Truth:
        return self._submit(pod, length)

    def _submit(self, pod: int, length: int) -> Truth:
        """It runs on whether or not somebody listens."""
        truth = Truth(make_request(kind="completion", grace_ms=LEASE_MS), length)
        stream = self.run(self.pods[pod].open(truth.request, None, None))
        self.known.append(truth)
        self.all_clients.append(Client(truth, self.pods[pod], stream))
        return truth

    @rule(truth=truths, count=st.integers(1, 4), together=st.booleans(), cut=st.booleans())
    def work(self, truth: Truth, count: int, together: bool, cut: bool) -> None:
        """Some records, in one call or in several; with `cut` nobody hears them."""
        if cut:
            self.run(self._cut())
        self.run(self.workers.work(truth, count, together))

    @rule(truth=truths, count=st.integers(1, 3))
    def append_unheard(self, truth: Truth, count: int) -> None:
        """The records reach the log, their publication nobody, without any sign of it."""
        self.run(self.workers.append_unheard(truth, count))

    @rule()
    def cut(self) -> None:
        self.run(self._cut())

    @rule(truth=truths, seq=st.integers(0, 9))
    def publish_again(self, truth: Truth, seq: int) -> None:
        """A record that is logged comes twice, late."""
        if truth.logged is not None and seq < truth.logged:
            channel = keys.channel_name(truth.request.rid)
            self.run(self.redis.publish(channel, payload(seq, truth.length)))

    @rule(truth=truths, seq=st.integers(0, 9))
    def commit_again(self, truth: Truth, seq: int) -> None:
        """A worker whose reply was lost sends a record once more."""
        if truth.owner is not None and truth.logged is not None and seq < truth.logged:
            assert self.run(self.workers.commit(truth, *truth.owner, seq)) is ReplyKind.DUP

    @rule(truth=truths)
    def take_over(self, truth: Truth) -> None:
        """The worker goes silent with all it runs. The next one takes this one over, the others when asked to work."""
        self.run(self.workers.fall_silent())
        if not truth.done:
            self.run(self.workers.own(truth))

    @rule(truth=truths, which=st.integers(0, 9), ahead=st.sampled_from([0, 0, 1, -1]), calm=st.booleans())
    def late_write(self, truth: Truth, which: int, ahead: int, calm: bool) -> None:
        """A former owner comes back with words of its own, perhaps when all wait for just this record.

        Who was an owner is for the real queue to say, so no choice of Hypothesis's may depend on it: a replay, in which
        it comes out otherwise, would have other choices than the run.
        """
        former = truth.former or [one for other in self.known for one in other.former]
        if not former:
            return
        worker, claim = former[which % len(former)]
        [truth] = [one for one in self.known if one.request.rid == claim.rid]
        if calm:
            self.catch_up()
        seq = max(0, (truth.logged or 0) + ahead)
        [reply] = self.run(worker.commit([Commit(claim, seq, token_record(seq, 9999))]))
        assert reply.kind in LOST

    @rule(truth=truths, count=st.integers(1, 3))
    def go_backwards(self, truth: Truth, count: int) -> None:
        """A failover to a replica that had not yet heard of the last records; the worker sends them again."""
        if truth.owner is None or truth.logged is None or truth.done or count > truth.logged:
            return
        self.run(self.workers.go_backwards(truth, truth.logged - count))
        assert self.run(self.workers.commit(truth, *truth.owner, truth.logged)) is ReplyKind.GAP
        truth.logged -= count

    @rule(sure=st.booleans())
    def forget_everything(self, sure: bool) -> None:
        if not sure:
            return  # seldom
        self.run(self.redis.flushall())
        self.run(self.workers.current.ensure_group())
        for truth in self.known:
            for worker, claim in filter(None, (truth.owner, truth.silent)):
                [reply] = self.run(worker.renew([claim]))
                assert reply.kind in LOST
                truth.former.append((worker, claim))
            truth.owner = truth.silent = truth.logged = None

    @rule(target=clients, truth=truths, pod=st.integers(0, PODS - 1), cursor=st.integers(BEFORE_OPENING, 9))
    def resume(self, truth: Truth, pod: int, cursor: int) -> Any:
        """A client that has seen everything up to `cursor`, or up to what there is."""
        return self._resume(truth, pod, min(cursor, (truth.logged or 0) - 1))

    @rule(target=clients, client=clients, pod=st.integers(0, PODS - 1))
    def reconnect(self, client: Client, pod: int) -> Any:
        """A client loses its connection and goes on elsewhere, after the last event it has."""
        client.read()
        seen = int(client.events[-1][0].rsplit(":", 1)[1]) if client.events else client.cursor
        self.run(client.leave())
        return self._resume(client.truth, pod, seen)

    def _resume(self, truth: Truth, pod: int, cursor: int) -> Client:
        relay = self.pods[pod]
        try:
            stream, _ = self.run(relay.resume(truth.request.rid, ""))
        except StreamExpired:
            assert truth.logged is None, "it is in Redis"
            return self.all_clients[0]
        client = Client(truth, relay, stream, cursor)
        self.all_clients.append(client)
        return client

    @rule()
    def catch_up(self) -> None:
        """Given a moment, everybody who still listens has all there is."""
        self.run(eventually(self._is_caught_up, HANGS_S, what="everybody has all there is"))

    @invariant()
    def nobody_saw_anything_but_the_truth(self) -> None:
        for client in self.all_clients:
            client.read()
            expected = client.truth.events_after(client.cursor)
            assert client.events == expected[: len(client.events)]
            assert client.stream.error is None
            if not client.stream.left:
                assert client.ends == client.stream.ended
                assert not client.ends or client.events == expected

    def teardown(self) -> None:
        """All requests are run to their end; then every client that stayed has everything."""
        try:
            self.run(self._finish())
            self.nobody_saw_anything_but_the_truth()
            waiting = [client for client in self.all_clients if not client.stream.left]
            assert [client.events for client in waiting] == [c.truth.events_after(c.cursor) for c in waiting]
        finally:
            self.run(self._close())
            self.runner.close()

    async def _finish(self) -> None:
        async def over() -> bool:
            for truth in self.known:
                if not truth.done:
                    await self.workers.work(truth, truth.length, True)
            return all(client.stream.over for client in self.all_clients)

        await eventually(over, HANGS_S, what="all streams end")

    async def _close(self) -> None:
        for pod in self.pods:
            await pod.close()
        for subscriber in self.subscribers:
            await subscriber.close()
        await self.redis.aclose()
        await self.blocking.aclose()

    async def _cut(self) -> None:
        await self.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    async def _is_caught_up(self) -> bool:
        return all(
            client.stream.left or client.truth.logged is None or client.stream.last + 1 >= client.truth.logged
            for client in self.all_clients
        )


def _check(server: RedisServer, monkeypatch: pytest.MonkeyPatch, examples: int, steps: int) -> None:
    monkeypatch.setattr(follower, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(relay, "_CLOSE_S", 0.01)  # those who wait for a grace time to pass need not be waited for
    run_machine(lambda: RelayMachine(server), examples, steps)


@pytest.mark.timeout(600)  # a failure takes its time to shrink
def test_the_relay_keeps_its_promises(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(redis_server, monkeypatch, 25, 30)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_relay_keeps_its_promises_for_long(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(redis_server, monkeypatch, 500, 60)
