"""Processes that are asked to end (SIGTERM): their work goes on elsewhere at once, or ends in time.

Given leases of 20 s, when a worker or a pod is stopped while it streams, then no client waits for a lease, and when all
of them are restarted one by one under load, then nothing fails and nothing comes twice.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.chaos.conftest import Arena, make_arenas
from tests.support.chaos_checks import Books, assert_exact, busiest, field_of, queued
from tests.support.chaos_load import Expected, Oracle, follow_all
from tests.support.patience import Patience
from tests.support.redis_server import RedisServer
from tests.support.renewed import Renewed
from tests.support.stack import Pod, Process, Stack
from tests.support.stream_client import Outcome, events, follow
from tests.support.wait import eventually

LEASE_S = 20.0
WORKER_EXIT_S = 2.0
PROCESS_END_S = 1.0
"""For the interpreter's own end, on a busy machine; the drain itself has WORKER_EXIT_S."""
DRAIN_S = 2.0
PAUSE_S = 3.0
"""Far below a lease."""
UVICORN_S = 3.0
"""For closing the server after the drain."""
ENV = {
    "HEADRACE_LEASE_MS": str(int(LEASE_S * 1000)),
    "HEADRACE_FAULT": "step-delay-ms:40",
    "HEADRACE_DTYPE": "float32",
    "HEADRACE_MAX_TRIES": "1",  # one hand-back that costs a try would end a request
}


@pytest.fixture(scope="module")
def arenas(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renewed[Arena]]:
    pod_env = {"HEADRACE_DRAIN_TIMEOUT_S": str(DRAIN_S)}
    log_dir = tmp_path_factory.mktemp("logs")
    yield from make_arenas(log_dir, tiny, pods=2, workers=2, worker_env=ENV, pod_env=pod_env)


async def all_speak(outcomes: list[Outcome], events: int = 4) -> None:
    await eventually(lambda: all(len(o.arrivals) >= events for o in outcomes), 30, what=f"{events} events everywhere")


async def exit_time(process: Process, limit_s: float = 15.0) -> float:
    """Sends SIGTERM; seconds until the process has ended with code 0."""
    began = time.monotonic()
    process.terminate()
    assert await asyncio.to_thread(process.wait, limit_s) == 0
    return time.monotonic() - began


async def test_sh_01_sh_07_a_stopped_worker_leaves_within_two_seconds_and_its_streams_go_on(
    server: RedisServer, stack: Stack, oracle: Oracle, patience: Patience
) -> None:
    url = stack.pods[0].url
    expected = await oracle.expected(8, (100, 140))
    books, outcomes = Books.open(server), [Outcome() for _ in expected]
    running = asyncio.create_task(follow_all([url], expected, outcomes=outcomes))
    await all_speak(outcomes)
    leaving, taken = busiest(server, stack.workers, outcomes)
    assert taken
    assert await exit_time(leaving) < WORKER_EXIT_S + PROCESS_END_S * patience
    assert_exact(expected, await running)
    assert [outcome.reconnects for outcome in outcomes] == [0] * len(outcomes)
    assert max(outcome.longest_gap for outcome in outcomes) < PAUSE_S * patience
    assert {field_of(server, rid, "epoch") for rid in taken} == {"2"}
    await books.settle(outcomes)
    assert "Traceback" not in leaving.log()
    leaving.restart()


async def test_sh_03_sh_05_a_stopped_pod_finishes_what_fits_and_redirects_the_rest(
    server: RedisServer, stack: Stack, oracle: Oracle, patience: Patience
) -> None:
    leaving, other = stack.pods
    long, short = await oracle.expected(6, (100, 110)), await oracle.expected(5, (8, 12))
    expected, books = [*long, *short], Books.open(server)
    outcomes = [Outcome() for _ in expected]
    running = asyncio.create_task(_from(leaving, other, expected, outcomes))
    await all_speak(outcomes[: len(long)])
    await eventually(lambda: all(o.arrivals for o in outcomes), 30, what="the short ones were accepted as well")
    took = await exit_time(leaving)
    assert_exact(expected, await running)
    assert took < DRAIN_S + UVICORN_S * patience
    assert [outcome.reconnects for outcome in outcomes] == [1] * len(long) + [0] * len(short)
    assert max(outcome.longest_gap for outcome in outcomes) < PAUSE_S * patience
    await books.settle(outcomes)
    log = leaving.log()
    assert "Traceback" not in log
    assert "CancelledError" not in log
    leaving.restart()


async def _from(
    leaving: Pod, other: Pod, expected: list[Expected], outcomes: list[Outcome]
) -> list[Outcome | BaseException]:
    """All begin at `leaving` and go on at `other`."""

    async def one(number: int) -> Outcome:
        outcome, load = outcomes[number], expected[number].load
        return await follow(
            lambda: [other.url if outcome.last_id else leaving.url],
            load.path,
            load.body,
            outcome=outcome,
            deadline_s=60,
        )

    return await asyncio.gather(*map(one, range(len(expected))), return_exceptions=True)


async def test_an_idle_connection_does_not_keep_a_pod(stack: Stack, patience: Patience) -> None:
    pod = stack.pods[0]
    async with httpx.AsyncClient(base_url=pod.url, timeout=10, trust_env=False, verify=False) as client:
        for path in ("/health", "/v1/models"):
            assert (await client.get(path)).status_code == 200
        assert await exit_time(pod) < UVICORN_S * patience
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
    pod.restart()


async def test_sh_01_rd_21_everything_is_restarted_one_by_one_under_load(
    server: RedisServer, stack: Stack, oracle: Oracle, patience: Patience
) -> None:
    expected = await oracle.expected(24, (40, 110))
    books, outcomes = Books.open(server), [Outcome() for _ in expected]
    listening = {pod.url for pod in stack.pods}
    calm = asyncio.Event()

    async def client(number: int) -> Outcome:
        """One after the other, so that there is load all the time; the last ones when all is over."""
        await asyncio.wait([asyncio.create_task(calm.wait())], timeout=number * 0.5)
        load = expected[number].load
        return await follow(
            lambda: sorted(listening), load.path, load.body, outcome=outcomes[number], seed=number, deadline_s=90
        )

    running = asyncio.gather(*map(client, range(len(expected))), return_exceptions=True)
    for process in (stack.workers[0], stack.pods[0], stack.workers[1], stack.pods[1], stack.workers[0]):
        if isinstance(process, Pod):
            listening.discard(process.url)  # as a load balancer does when /ready says no
        await exit_time(process)
        await process.restarted()
        if isinstance(process, Pod):
            listening.add(process.url)
    calm.set()
    assert_exact(expected, await running)
    assert max(outcome.reconnects for outcome in outcomes) <= 1, "only those that a leaving pod sent elsewhere"
    assert max(outcome.longest_gap for outcome in outcomes) < PAUSE_S * patience
    assert len(await books.settle(outcomes)) == len(expected)


async def _ending(url: str) -> str:
    """How one client's stream ended: an error's code, "done", "refused", "no server", or "cut" (which must not be)."""
    body = {"model": "tiny", "prompt": "late", "max_tokens": 100, "ignore_eos": True, "stream": True}
    answered, last = False, {"data": ""}
    async with httpx.AsyncClient(timeout=30, trust_env=False, verify=False) as client:
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                answered = True
                if response.status_code != 200:
                    assert (response.status_code, int(response.headers["retry-after"])) == (503, 1)
                    return "refused"
                async for event in events(response):
                    last = event
        except httpx.TransportError:
            return "cut" if answered else "no server"
    if last["data"] == "[DONE]":
        return "done"
    return str(json.loads(last["data"] or "{}").get("error", {}).get("code", "cut"))


async def test_sh_03_requests_that_meet_a_shutdown_are_answered_or_refused_never_cut(
    server: RedisServer, stack: Stack
) -> None:
    """Up to its last moment a pod takes a request only if its client will hear how it ends."""
    pod, books, endings, gone = stack.pods[0], Books.open(server), Counter[str](), asyncio.Event()

    async def client_after_client() -> None:
        while not gone.is_set():
            endings[await _ending(pod.url)] += 1

    clients = [asyncio.create_task(client_after_client()) for _ in range(6)]
    await eventually(lambda: queued(server) == len(clients), 10, what="all stream")
    await exit_time(pod)
    gone.set()
    await asyncio.gather(*clients)
    assert endings["resume"] == len(clients)
    assert set(endings) <= {"resume", "refused", "no server"}, endings
    await pod.restarted()
    await books.settle([], others=len(clients))
