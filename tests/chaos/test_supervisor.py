"""`headrace serve` with three workers: a death is seen at once, and a request that causes deaths is put aside.

Given a lease of 20 s, when a worker is killed, then its streams go on within seconds, because the supervisor hands them
back. Given a request that ends whoever runs it, then two workers die, its neighbours lose nothing, and it is kept.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.connections import command_client
from shared.keys import log_key
from shared.messages import WorkerCard
from shared.registry import list_workers
from tests.support.chaos_checks import Books, assert_exact, connected, field_of
from tests.support.chaos_load import Oracle, follow_all
from tests.support.headrace_cli import run_headrace
from tests.support.patience import Patience
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.renewed import Renewed, renewing
from tests.support.stack import Process
from tests.support.stream_client import Outcome, follow
from tests.support.wait import eventually

WORKERS = 3
LEASE_S = 20
CONTINUE_S = 6.0
POISON = 0
"""<|endoftext|>, which no text of a neighbour becomes."""
FAULT = f"step-delay-ms:20,exit-on-token:{POISON}"
FAULT_EXIT_CODE = 99


@dataclass
class Served(Process):
    """`headrace serve`, its workers and its pod."""

    port: int = 0
    redis_url: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def output(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def is_ready(self) -> bool:
        return "Headrace is ready" in self.output()

    def poisoned_deaths(self) -> int:
        return len(re.findall(rf"worker \d+ exited with code {FAULT_EXIT_CODE}", self.output()))

    def headrace(self, *arguments: str) -> str:
        return run_headrace(self.redis_url, *arguments)

    def letters(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.headrace("dead", "list", "--json"))
        return found


@dataclass
class Place:
    server: RedisServer
    served: Served


@pytest.fixture(scope="module")
def places(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renewed[Place]]:
    @contextmanager
    def make() -> Iterator[Place]:
        with RedisServer() as server, serving(server, tiny, tmp_path_factory.mktemp("serve")) as served:
            yield Place(server, served)

    yield from renewing(make)


@pytest.fixture
def server(places: Renewed[Place]) -> RedisServer:
    return places.get().server


@pytest.fixture
def served(places: Renewed[Place]) -> Served:
    return places.get().served


@contextmanager
def serving(server: RedisServer, tiny: Path, folder: Path) -> Iterator[Served]:
    port = free_port()
    flags = {"workers": WORKERS, "port": port, "redis-url": server.url, "lease-ms": LEASE_S * 1000, "threads": 1}
    flags |= {"dtype": "float32", "kv-cache-memory": "64M"}
    command = [sys.executable, "-m", "headrace", "serve", str(tiny)]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    process = Served("serve", command, {"HEADRACE_FAULT": FAULT}, folder / "serve.log", port, server.url)
    process.start()
    try:
        process.wait_ready()
        yield process
    finally:
        process.terminate()
        process.wait(30)


async def workers(server: RedisServer) -> list[WorkerCard]:
    client = command_client(server.url)
    try:
        return await list_workers(client)
    finally:
        await client.aclose()


async def all_ready(server: RedisServer) -> list[WorkerCard]:
    """All workers, restarted ones too."""

    async def ready() -> list[WorkerCard] | None:
        cards = [card for card in await workers(server) if card.state == "ready" and _runs(card.pid)]
        return cards if len(cards) == WORKERS else None

    cards = await eventually(ready, 60, interval=0.1, what="all workers are ready")
    assert cards is not None
    return cards


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists()


async def test_a_killed_workers_streams_go_on_at_once_not_after_a_lease(
    server: RedisServer, served: Served, oracle: Oracle, patience: Patience
) -> None:
    expected = await oracle.expected(8, (100, 140))
    cards = await all_ready(server)
    books, outcomes = Books.open(server), [Outcome() for _ in expected]
    running = asyncio.create_task(follow_all([served.url], expected, outcomes=outcomes))
    await eventually(lambda: all(len(o.arrivals) > 4 for o in outcomes), 30, what="all streams speak")
    owners = Counter(field_of(server, o.rid, "holder") for o in outcomes if field_of(server, o.rid, "state") == "open")
    [(owner, _)] = owners.most_common(1)
    [victim] = [card for card in cards if card.worker_id == owner]
    taken = [o for o in outcomes if field_of(server, o.rid, "holder") == owner]
    os.kill(victim.pid, signal.SIGKILL)
    assert_exact(expected, await running)
    assert max(outcome.longest_gap for outcome in taken) < min(CONTINUE_S * patience, LEASE_S)
    assert [outcome.reconnects for outcome in outcomes] == [0] * len(outcomes)
    await books.settle(outcomes)
    assert victim.pid not in [card.pid for card in await all_ready(server)]


async def test_a_poisonous_request_costs_two_workers_and_no_neighbour(
    server: RedisServer, served: Served, oracle: Oracle
) -> None:
    expected = await oracle.expected(10, (80, 120))
    await all_ready(server)
    books, outcomes = Books.open(server), [Outcome() for _ in expected]
    early, late = slice(0, 7), slice(7, 10)
    running = asyncio.create_task(follow_all([served.url], expected[early], outcomes=outcomes[early]))
    await eventually(lambda: sum(len(o.arrivals) > 4 for o in outcomes) >= 4, 30, what="neighbours speak")
    body = {"model": "tiny", "prompt": [POISON, 5, 6], "max_tokens": 5}
    poison = asyncio.create_task(follow(lambda: [served.url], "/v1/completions", body, deadline_s=60))
    newer = await follow_all([served.url], expected[late], outcomes=outcomes[late])
    assert_exact(expected, [*await running, *newer])
    assert [outcome.reconnects for outcome in outcomes] == [0] * len(outcomes)
    ended = await poison
    assert ended.error is not None
    assert (ended.error["code"], ended.done, ended.texts) == ("request_poisoned", False, {})
    assert served.poisoned_deaths() == 2
    await books.settle(outcomes, others=1)

    [letter] = served.letters()
    assert (letter["code"], letter["tries"], letter["model"]) == ("request_poisoned", 2, "tiny")
    assert letter["request"] in ended.error["message"] + served.headrace("dead", "list")
    await _replay_and_drop(server, served, letter["request"])


async def _replay_and_drop(server: RedisServer, served: Served, rid: str) -> None:
    """Queued again under a new id it is still poisonous, and kept again until it is dropped."""
    await all_ready(server)
    [new] = re.findall(r"queued again as (\w+)", served.headrace("dead", "replay", rid))
    await eventually(lambda: [letter["request"] for letter in served.letters()] == [new], 60, interval=0.5)
    assert served.poisoned_deaths() == 4
    assert json.loads(served.headrace("dead", "show", new))["body"]["prompts"] == [[POISON, 5, 6]]
    served.headrace("dead", "drop", new)
    assert served.letters() == []
    with connected(server) as client:
        assert client.exists(log_key(new)), "its log is kept like any other"
    await all_ready(server)
