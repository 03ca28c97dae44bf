"""Redis loses connections, replies, keys, memory or its life while two pods stream from two workers.

Given running and queued streams, when Redis misbehaves, then each goes on exactly, new requests meanwhile are answered
or refused with a time to retry, and afterwards nothing is left in a queue and the ledger says what was streamed. Pods
and workers reach Redis through a proxy each, so that either side can be cut off alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shared.keys import GROUP, queue_key
from tests.support.chaos_checks import Books, assert_exact, connected, field_of, read_log
from tests.support.chaos_load import Oracle, follow_all
from tests.support.chaos_proxy import ChaosProxy
from tests.support.chaos_scene import Scene, accepted, flush_all, refused, stored_records, streaming
from tests.support.patience import Patience
from tests.support.redis_server import RedisServer
from tests.support.renewed import Renewed, renewing
from tests.support.stack import Stack
from tests.support.stream_client import Outcome, events
from tests.support.wait import eventually, eventually_sync

STREAMS = 16
TOKENS = (50, 90)
LEASE_S = 2.0
ENV = {
    "HEADRACE_LEASE_MS": str(int(LEASE_S * 1000)),
    "HEADRACE_FAULT": "step-delay-ms:20",
    "HEADRACE_DTYPE": "float32",
    "HEADRACE_MAX_NUM_SEQS": "6",
}
QUEUE = queue_key(0, "tiny", "interactive")
WORKER_DRAIN_S, POD_DRAIN_S = 2.0, 1.0
EXIT_MARGIN_S = 3.0
"""Connections are closed with a time limit each, and the interpreter ends, on a busy machine."""
REFUSED_S = 2.5
"""A pod says no when Redis has been silent for a second; a probe takes another one, a busy machine some more."""


@contextmanager
def _scene(tiny: Path, log_dir: Path) -> Iterator[Scene]:
    with RedisServer(aof=True) as server, ChaosProxy(server.port) as pods, ChaosProxy(server.port) as workers:
        envs = {
            "pod_env": {"HEADRACE_REDIS_URL": pods.url, "HEADRACE_DRAIN_TIMEOUT_S": str(POD_DRAIN_S)},
            "worker_env": {**ENV, "HEADRACE_REDIS_URL": workers.url},
        }
        with Stack(server.url, tiny, pods=2, workers=2, **envs, log_dir=log_dir) as stack:
            yield Scene(server, stack, pods, workers)


@pytest.fixture(scope="module")
def scenes(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renewed[Scene]]:
    yield from renewing(lambda: _scene(tiny, tmp_path_factory.mktemp("logs")))


@pytest.fixture
def scene(scenes: Renewed[Scene]) -> Iterator[Scene]:
    """All is calm again when a test has passed; one that failed leaves nothing to wait for."""
    scene = scenes.get()
    yield scene
    if not scenes.spoilt:
        scene.pod_side.heal()
        scene.worker_side.heal()
        eventually_sync(lambda: all(scene.settled()), 30, interval=0.1, what="all is calm again")


async def test_subscriptions_killed_five_times_a_second(scene: Scene, oracle: Oracle) -> None:
    killed = 0
    async with streaming(scene, await oracle.expected(STREAMS, TOKENS)) as outcomes:
        with connected(scene.server) as client:
            while not all(outcome.done for outcome in outcomes):
                killed += client.client_kill_filter(_type="pubsub")
                await asyncio.sleep(0.2)
    assert killed > 15


@pytest.mark.parametrize("side", ["pod_side", "worker_side"])
async def test_every_fifth_reply_is_lost_with_its_connection(scene: Scene, oracle: Oracle, side: str) -> None:
    """Streams that run already never notice. New ones may hear 503, and are there exactly once in the end."""
    expected, proxy = await oracle.expected(STREAMS, TOKENS), getattr(scene, side)
    books, outcomes = Books.open(scene.server), [Outcome() for _ in expected]
    early, late = slice(0, STREAMS // 2), slice(STREAMS // 2, STREAMS)
    running = asyncio.create_task(follow_all(scene.urls, expected[early], outcomes=outcomes[early]))
    await eventually(lambda: sum(len(o.arrivals) > 2 for o in outcomes) >= 4, 30, what="four streams speak")
    proxy.drop_every = 5
    later = await follow_all(scene.urls, expected[late], outcomes=outcomes[late])
    done = [*await running, *later]
    proxy.heal()
    assert proxy.dropped > 20
    assert_exact(expected, done)
    assert [outcome.reconnects for outcome in outcomes[early]] == [0] * (STREAMS // 2)
    refusals = sum(outcome.reconnects for outcome in outcomes[late])
    await books.settle(outcomes, others=refusals)


async def test_rd_09_flushall_in_mid_stream(scene: Scene, oracle: Oracle) -> None:
    expected = await oracle.expected(STREAMS, TOKENS)
    outcomes = [Outcome() for _ in expected]
    running = asyncio.create_task(follow_all(scene.urls, expected, outcomes=outcomes))
    for seen in (3, 12):
        await eventually(lambda n=seen: sum(len(o.arrivals) > n for o in outcomes) >= 5, 30, what="streams speak")
        ended = flush_all(scene.server, [outcome.rid for outcome in outcomes])
    assert_exact(expected, await running)
    assert [outcome.reconnects for outcome in outcomes] == [0] * STREAMS
    # Ledger and logs began anew with the flush.
    await Books(scene.server).settle(outcome for outcome in outcomes if outcome.rid not in ended)


@pytest.mark.parametrize("loss", ["xtrim", "del"])
async def test_rd_06_rd_23_the_request_stream_is_lost_with_queued_and_running_requests(
    scene: Scene, oracle: Oracle, loss: str, patience: Patience
) -> None:
    async with streaming(scene, await oracle.expected(2 * STREAMS, TOKENS)) as outcomes:
        assert sum(not outcome.texts for outcome in outcomes) >= 2, "some wait in the queue"
        scene.run(lambda client: client.xtrim(QUEUE, maxlen=0) if loss == "xtrim" else client.delete(QUEUE))
    assert max(outcome.longest_gap for outcome in outcomes) < 10 * patience


async def test_rd_07_the_group_is_destroyed(scene: Scene, oracle: Oracle) -> None:
    async with streaming(scene, await oracle.expected(STREAMS, TOKENS)):
        scene.run(lambda client: client.xgroup_destroy(QUEUE, GROUP))


async def test_a_full_instance_is_a_pause_and_a_503(scene: Scene, oracle: Oracle) -> None:
    async with streaming(scene, await oracle.expected(STREAMS, TOKENS)) as outcomes:
        scene.run(lambda client: client.config_set("maxmemory", 1))
        try:
            stored = stored_records(scene, outcomes)
            for _ in range(2):
                await asyncio.gather(*map(refused, scene.urls))
            assert stored_records(scene, outcomes) == stored, "nothing can be stored"
            shown = {o.rid: int(o.last_id.rsplit(":", 1)[1]) for o in outcomes if o.rid in stored}
            assert all(number <= stored[rid] for rid, number in shown.items()), "and nothing else is shown"
        finally:
            scene.run(lambda client: client.config_set("maxmemory", 0))
    await accepted(scene, 10)


async def test_a_frozen_redis_is_a_pause_and_a_503(scene: Scene, oracle: Oracle, patience: Patience) -> None:
    async with streaming(scene, await oracle.expected(STREAMS, TOKENS)):
        scene.server.freeze()
        began = time.monotonic()
        try:
            took = await asyncio.gather(*map(refused, scene.urls))
            await eventually(lambda: time.monotonic() - began > LEASE_S, LEASE_S + 5, what="every lease has run out")
        finally:
            scene.server.thaw()
    assert max(took) < REFUSED_S * patience
    await accepted(scene, 10)


async def test_rd_29_a_redis_that_dies_and_comes_back_is_a_pause_and_a_503(
    scene: Scene, oracle: Oracle, patience: Patience
) -> None:
    async with streaming(scene, await oracle.expected(STREAMS, TOKENS)):
        scene.server.kill()
        for _ in range(2):  # the second time the pods know already
            took = await asyncio.gather(*map(refused, scene.urls))
            assert max(took) < REFUSED_S * patience
        scene.server.start()


async def test_a_restart_of_redis_that_is_over_soon_refuses_nobody(scene: Scene, oracle: Oracle) -> None:
    """Neither running streams nor requests that come meanwhile."""
    async with streaming(scene, await oracle.expected(STREAMS, TOKENS), others=2):
        scene.server.kill()
        newcomer = asyncio.create_task(accepted(scene, 20))
        answered, _ = await asyncio.wait([newcomer], timeout=0.1)
        assert not answered
        scene.server.start()
        await newcomer
    await accepted(scene, 10)


async def test_sc_16_a_lost_cancellation_is_found_at_the_next_renewal(scene: Scene, patience: Patience) -> None:
    books = Books.open(scene.server)
    body = {"model": "tiny", "prompt": "gone", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    scene.worker_side.swallow = b"cancel:"
    async with (
        httpx.AsyncClient(timeout=30, trust_env=False, verify=False) as client,
        client.stream("POST", f"{scene.urls[0]}/v1/completions", json=body) as response,
    ):
        event = await anext(events(response))
    rid = event["id"].rsplit(":", 1)[0]
    await eventually(lambda: scene.worker_side.swallowed, 5, what="the message was lost")
    swallowed = time.monotonic()
    await eventually(lambda: field_of(scene.server, rid, "state") == "done", 10, what="the request is ended")
    assert time.monotonic() - swallowed < LEASE_S * patience
    assert [delta.finish_reason for delta in read_log(scene.server, rid)[-1].deltas] == ["abort"]
    await books.settle([], others=1)


async def test_rl_05_sh_02_without_redis_everybody_ends_in_time(
    scene: Scene, oracle: Oracle, patience: Patience
) -> None:
    """SIGTERM while Redis hangs: pod and worker leave within their limits, and their streams go on elsewhere."""
    expected = await oracle.expected(STREAMS, TOKENS)
    books, outcomes = Books.open(scene.server), [Outcome() for _ in expected]
    running = asyncio.create_task(follow_all(scene.urls, expected, outcomes=outcomes))
    await eventually(lambda: sum(len(o.arrivals) > 4 for o in outcomes) >= 5, 30, what="five streams speak")
    pod, worker = scene.stack.pods[0], scene.stack.workers[0]
    scene.server.freeze()
    try:
        began = time.monotonic()
        pod.terminate()
        worker.terminate()
        assert await asyncio.to_thread(worker.wait, 10) == 0
        assert time.monotonic() - began < WORKER_DRAIN_S + EXIT_MARGIN_S * patience
        assert await asyncio.to_thread(pod.wait, 15) == 0
        assert time.monotonic() - began < POD_DRAIN_S + 2 + EXIT_MARGIN_S * patience
    finally:
        scene.server.thaw()
    await asyncio.gather(pod.restarted(), worker.restarted())
    assert_exact(expected, await running)
    await books.settle(outcomes, others=sum(outcome.reconnects for outcome in outcomes))


async def test_rd_29_after_every_cut_new_requests_start_soon(scene: Scene) -> None:
    for _ in range(10):
        scene.run(lambda client: client.client_kill_filter(_type="normal", skipme=True))
        await accepted(scene, 5)
    scene.pod_side.cut()
    scene.worker_side.cut()
    await accepted(scene, 5)
