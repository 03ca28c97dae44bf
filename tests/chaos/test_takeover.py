"""A worker hangs past its lease, another one continues, the first comes back, then the second is killed.

Given streams on two workers, when one is stopped (SIGSTOP) until its lease has run out and continued later, then it
writes nothing any more, frees its blocks and serves again; and clients notice no more than a pause.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.chaos.conftest import Arena, make_arenas
from tests.support.chaos_checks import Books, assert_exact, busiest, field_of, held_by, read_log
from tests.support.chaos_load import Oracle, follow_all
from tests.support.patience import Patience
from tests.support.redis_server import RedisServer
from tests.support.renewed import Renewed
from tests.support.stack import Stack, Worker
from tests.support.stream_client import Outcome
from tests.support.wait import eventually

LEASE_S = 3.0
STREAMS = 8
ENV = {"HEADRACE_LEASE_MS": str(int(LEASE_S * 1000)), "HEADRACE_FAULT": "step-delay-ms:40", "HEADRACE_DTYPE": "float32"}


@pytest.fixture(scope="module")
def arenas(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renewed[Arena]]:
    yield from make_arenas(tmp_path_factory.mktemp("logs"), tiny, pods=1, workers=2, worker_env=ENV)


def fenced(worker: Worker) -> set[str]:
    """Requests that it says it has dropped because they are another's."""
    lines = [json.loads(line) for line in worker.log_path.read_text().splitlines() if line.startswith("{")]
    return {line["rid"] for line in lines if line["event"] == "request dropped" and line["why"] == "fenced"}


def fenced_count(worker: Worker) -> float:
    """The same as its heartbeat and /metrics show it."""
    card = worker.card()
    return card.counters.get("dropped_fenced", 0.0) if card is not None else 0.0


def is_free(worker: Worker) -> bool:
    card = worker.card()
    return card is not None and card.running == 0 and card.waiting == 0 and card.kv_blocks_used == 0


async def all_speak(outcomes: list[Outcome], events: int = 5) -> None:
    await eventually(lambda: all(len(o.arrivals) >= events for o in outcomes), 30, what=f"{events} events everywhere")


async def test_rl_18_a_worker_that_comes_back_writes_nothing_and_the_next_death_costs_nothing(
    server: RedisServer, stack: Stack, oracle: Oracle
) -> None:
    url = stack.pods[0].url
    expected = await oracle.expected(STREAMS, (100, 140))
    books, outcomes = Books.open(server), [Outcome() for _ in expected]
    running = asyncio.create_task(follow_all([url], expected, outcomes=outcomes))
    await all_speak(outcomes)
    first, taken = busiest(server, stack.workers, outcomes)
    [second] = [worker for worker in stack.workers if worker is not first]
    assert taken
    first.stop()
    try:
        await eventually(
            lambda: set(taken) <= set(held_by(server, second, outcomes)), LEASE_S + 10, what="the second has them all"
        )
        await eventually(lambda: all(len(o.arrivals) > 10 for o in outcomes), 20, what="all streams go on")
        # With the second one stopped as well (its lease still holds), whatever is written now is the first one's.
        second.stop()
        logs = {rid: read_log(server, rid) for rid in taken}
        first.cont()
        await eventually(lambda: fenced(first) >= set(taken), LEASE_S, what="the first was fenced off everything")
        epochs = {rid: field_of(server, rid, "epoch") for rid in taken}
        assert {rid: read_log(server, rid) for rid in taken} == logs
        assert set(epochs.values()) == {"2"}
        await eventually(lambda: fenced_count(first) == len(taken) and is_free(first), 5, what="its blocks are free")
    finally:
        first.cont()
        second.cont()
    second.kill()
    body = {"model": "tiny", "prompt": "again", "max_tokens": 3}
    async with httpx.AsyncClient(timeout=30, trust_env=False, verify=False) as client:
        assert (await client.post(f"{url}/v1/completions", json=body)).status_code == 200, "the first serves again"
    done = await running
    assert_exact(expected, done)
    assert [outcome.reconnects for outcome in outcomes] == [0] * STREAMS, "the pod let nobody down"
    await books.settle(outcomes, others=1)
    assert {field_of(server, rid, "epoch") for rid in taken} & {"3"}, "the second died before it was done"
    await eventually(lambda: is_free(first), 5, what="every block is free again")
    second.restart()


async def test_rd_22_a_killed_workers_streams_go_on_within_a_lease(
    server: RedisServer, stack: Stack, oracle: Oracle, patience: Patience
) -> None:
    url = stack.pods[0].url
    expected = await oracle.expected(STREAMS, (100, 140))
    books, outcomes = Books.open(server), [Outcome() for _ in expected]
    running = asyncio.create_task(follow_all([url], expected, outcomes=outcomes))
    await all_speak(outcomes)
    victim, taken = busiest(server, stack.workers, outcomes)
    assert taken
    victim.kill()
    assert_exact(expected, await running)
    assert max(outcome.longest_gap for outcome in outcomes) < LEASE_S + 2 * patience
    assert {field_of(server, rid, "epoch") for rid in taken} == {"2"}
    await books.settle(outcomes)
    victim.restart()
