"""SC-14 through HTTP: odd requests by the thousand beside four running streams. Each gets an answer, none of the four
notices anything, and the worker is the same process as before."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.support.chaos_checks import assert_exact, connected, queued
from tests.support.chaos_load import CHAT, COMPLETIONS, Expected, Load, undisturbed
from tests.support.odd_requests import OddRequest, check_answer, odd_requests
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack
from tests.support.stream_client import Outcome, follow
from tests.support.tiny_model import make_tiny_llama
from tests.support.wait import eventually

AT_ONCE = 8
STREAM_TOKENS = 200
GREEDY, DRAWN = {"temperature": 0}, {"temperature": 1.0, "seed": 7}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as made:
        yield made


@pytest.fixture(scope="module")
def stack(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    with Stack(server.url, model, worker_env={"HEADRACE_DTYPE": "float32"}) as made:
        yield made


def good_loads() -> list[Load]:
    """With tenants of their own: what they get is theirs, however much the odd ones ask for."""
    bodies = [GREEDY, DRAWN, DRAWN | PENALTIES, GREEDY | {"n": 2}]
    loads = []
    for number, fields in enumerate(bodies):
        body = {"model": "tiny", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "user": f"good-{number}", **fields}
        text = f"The wheel number {number} turns."
        chat = {"messages": [{"role": "user", "content": text}]}
        loads.append(Load(CHAT, body | chat) if number % 2 else Load(COMPLETIONS, body | {"prompt": text}))
    return loads


async def stream_until(stop: asyncio.Event, url: str, expected: Expected) -> int:
    """The same stream again and again, each time exactly the undisturbed answer; how many times."""
    for count in itertools.count():
        if stop.is_set():
            return count
        outcome = await follow(lambda: [url], expected.load.path, expected.load.body, outcome=Outcome())
        assert_exact([expected], [outcome])
        assert outcome.reconnects == 0
    raise AssertionError


async def send_all(url: str, requests: Iterator[OddRequest]) -> Counter[int]:
    """Statuses of the answers, each of which was right; `AT_ONCE` are under way at any time."""
    statuses: Counter[int] = Counter()

    async def send(client: httpx.AsyncClient) -> None:
        for request in requests:
            try:
                response = await client.post(
                    url + request.path, content=request.data, headers={"content-type": "application/json"}
                )
                check_answer(request, response)
            except (AssertionError, httpx.TransportError, ValueError) as error:
                error.add_note(f"after {request.path} {request.data[:3000]!r}")
                raise
            statuses[response.status_code] += 1

    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(send(client))
    return statuses


async def bother(server: RedisServer, stack: Stack, count: int, seed: int) -> Counter[int]:
    [pod], [worker] = stack.pods, stack.workers
    pids, stop = (pod.pid, worker.pid), asyncio.Event()
    expected = await undisturbed(pod.url, good_loads())
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream_until(stop, pod.url, one)) for one in expected]
        statuses = await send_all(pod.url, itertools.islice(odd_requests(seed, "tiny"), count))
        stop.set()
    assert all(stream.result() >= 1 for stream in streams)
    assert worker.alive
    assert pod.alive
    card = worker.card()
    assert card is not None
    assert (pod.pid, card.pid) == pids
    await eventually(lambda: queued(server) == 0, what="nothing is left in the queue")
    await eventually(lambda: (now := worker.card()) is not None and now.kv_blocks_used == 0, what="no block is held")
    with connected(server) as client:
        assert list(client.scan_iter(match="*:dead", count=1000)) == []
    afterwards = await undisturbed(pod.url, good_loads())
    assert [one.texts for one in afterwards] == [one.texts for one in expected]
    return statuses


def assert_telling(statuses: Counter[int]) -> None:
    """Neither the door alone was tried, nor the engine, nor was most of it turned away for lack of room."""
    total = statuses.total()
    assert statuses[200] > 0.2 * total
    assert statuses[400] > 0.2 * total
    assert statuses[429] < 0.05 * total


async def test_sc_14_odd_requests_beside_four_streams(server: RedisServer, stack: Stack) -> None:
    assert_telling(await bother(server, stack, 400, seed=14))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
async def test_sc_14_five_thousand_odd_requests_beside_four_streams(
    server: RedisServer, stack: Stack, seed: int
) -> None:
    assert_telling(await bother(server, stack, 5000, seed))
