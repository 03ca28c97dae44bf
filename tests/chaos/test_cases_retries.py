"""Clients that repeat themselves, queues that are full, deadlines that pass: one generation for one wish, or none.

Given two pods and workers with few slots, when a request comes twice, too late or when nobody can wait any more, then
no token is computed that nobody asked for, and the client hears what to do.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.chaos.conftest import QUEUE_LIMIT, Front
from tests.support.chaos_checks import Books, field_of, queued, read_log
from tests.support.chaos_load import CHAT
from tests.support.headrace_cli import run_headrace
from tests.support.patience import Patience
from tests.support.stream_client import Outcome, follow
from tests.support.wait import eventually

NARROW_SLOTS = 2
LONG_TOKENS = 80
"""More than a second at the workers' pace."""
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "ignore_eos": True}


def body(model: str = "tiny", **changes: Any) -> dict[str, Any]:
    return {"model": model, **BODY, **changes}


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=60, trust_env=False, verify=False)


async def stream_to_end(url: str, request: dict[str, Any], **headers: str) -> Outcome:
    return await follow(lambda: [url], CHAT, request, headers=headers)


Busy = tuple[list[asyncio.Task[Outcome]], list[Outcome]]


async def submitted(front: Front, count: int, tokens: int = LONG_TOKENS) -> Busy:
    """Requests to the narrow worker, accepted in the order given."""
    tasks, outcomes = [], [Outcome() for _ in range(count)]
    for number, outcome in enumerate(outcomes):
        request = body("narrow", max_tokens=tokens, seed=number)
        following = follow(lambda: [front.roomy.url], CHAT, request, outcome=outcome)
        tasks.append(asyncio.create_task(following))
        await eventually(lambda one=outcome: one.rid, 10, what="it is accepted")
    return tasks, outcomes


async def occupied(front: Front, tokens: int = LONG_TOKENS) -> list[asyncio.Task[Outcome]]:
    """The narrow worker's slots are taken."""
    tasks, outcomes = await submitted(front, NARROW_SLOTS, tokens)
    await eventually(lambda: all(any(outcome.texts.values()) for outcome in outcomes), 10, what="both slots are taken")
    return tasks


@asynccontextmanager
async def crowd(front: Front, waiting: int) -> AsyncIterator[Busy]:
    """In the block the narrow worker hangs with its slots taken and `waiting` requests in its queue.

    Yields the tasks of all of them, and what those that wait saw.
    """
    running = await occupied(front)
    front.narrow.stop()
    try:
        more, outcomes = await submitted(front, waiting)
        yield [*running, *more], outcomes
    finally:
        front.narrow.cont()


async def test_the_same_key_on_two_pods_at_once_is_one_generation(front: Front) -> None:
    books = Books.open(front.server)
    pairs = []
    for number in range(10):
        key = {"Idempotency-Key": f"twice-{number}-{time.time_ns()}"}
        pairs += [stream_to_end(pod.url, body(), **key) for pod in front.stack.pods]
    outcomes = await asyncio.gather(*pairs)
    for one, other in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert (one.rid, one.texts, one.usage, one.ids) == (other.rid, other.texts, other.usage, other.ids)
        assert one.error is None
    assert len(await books.settle(outcomes)) == 10


async def test_sc_11_a_hundred_requests_with_one_request_id_are_a_hundred(front: Front) -> None:
    books, headers = Books.open(front.server), {"X-Request-Id": "the-same"}
    request = body(max_tokens=3, user="the-same")
    async with client() as http:
        posts = [http.post(f"{front.roomy.url}{CHAT}", json=request, headers=headers) for _ in range(100)]
        answers = await asyncio.gather(*posts)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}
    assert len({answer.json()["id"] for answer in answers}) == 100
    assert len(await books.settle([], others=100)) == 100


async def test_an_sdks_retry_after_its_pod_died_attaches_to_what_runs(front: Front) -> None:
    books, request = Books.open(front.server), body(max_tokens=120, seed=1)
    victim = front.strict
    async with client() as http:
        first = asyncio.create_task(
            http.post(f"{victim.url}{CHAT}", json=request, headers={"x-stainless-retry-count": "0"})
        )
        await eventually(lambda: queued(front.server) == 1, 10, what="it is queued")
        victim.kill()
        with pytest.raises(httpx.TransportError):
            await first
        again = await http.post(f"{front.roomy.url}{CHAT}", json=request, headers={"x-stainless-retry-count": "1"})
    assert again.status_code == 200
    [(rid, records)] = (await books.settle([], others=1)).items()
    assert again.json()["id"] == f"chatcmpl-{rid}"
    assert again.json()["usage"]["completion_tokens"] == 120
    assert records[-1].end is not None
    victim.restart()


async def test_a_deadline_that_passes_in_the_queue_costs_no_prefill(front: Front) -> None:
    books = Books.open(front.server)
    busy = await occupied(front, tokens=200)
    late = body("narrow", stream=False)
    async with client() as http:
        by_header = http.post(f"{front.roomy.url}{CHAT}", json=late, headers={"X-Request-Timeout": "0.3"})
        by_field = http.post(f"{front.roomy.url}{CHAT}", json={**late, "deadline_ms": 300})
        answers = await asyncio.gather(by_header, by_field)
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
        assert answer.headers["x-should-retry"] == "false"
    outcomes = await asyncio.gather(*busy)
    logs = await books.settle(outcomes, others=2)
    for rid in set(logs) - {outcome.rid for outcome in outcomes}:
        assert field_of(front.server, rid, "epoch") == "0", "no worker ever had it"
        [record] = read_log(front.server, rid)
        assert not any(delta.token_ids for delta in record.deltas)


async def test_rd_23_a_flood_is_refused_at_once_and_what_was_accepted_is_answered(front: Front) -> None:
    books = Books.open(front.server)
    request = body("narrow", max_tokens=20)
    async with client() as http:

        async def one() -> tuple[int, float, str]:
            began = time.monotonic()
            answer = await http.post(f"{front.strict.url}{CHAT}", json=request)
            return answer.status_code, time.monotonic() - began, answer.headers.get("retry-after", "")

        results = await asyncio.gather(*(one() for _ in range(5 * QUEUE_LIMIT)))
    codes = Counter(code for code, _, _ in results)
    assert set(codes) == {200, 429}
    assert codes[200] >= QUEUE_LIMIT
    assert all(1 <= int(retry) <= 60 for code, _, retry in results if code == 429)
    slowest_refusal = max(took for code, took, _ in results if code == 429)
    assert slowest_refusal < max(took for code, took, _ in results if code == 200)
    assert len(await books.settle([], others=codes[200])) == codes[200]


async def test_retry_after_is_what_it_takes(front: Front, patience: Patience) -> None:
    """The measured drain rate makes the estimate: after that time (twice, at most) there is room."""
    books = Books.open(front.server)
    async with client() as http:
        async with crowd(front, QUEUE_LIMIT) as (waiting, _):
            refused = await http.post(f"{front.strict.url}{CHAT}", json=body("narrow", max_tokens=1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        retry_after, began = int(refused.headers["retry-after"]), time.monotonic()
        await eventually(lambda: queued(front.server) < NARROW_SLOTS + QUEUE_LIMIT, 60, what="room")
        assert time.monotonic() - began < (2 * retry_after + 2) * patience
        accepted = await http.post(f"{front.strict.url}{CHAT}", json=body("narrow", max_tokens=1))
    assert accepted.status_code == 200
    await books.settle(await asyncio.gather(*waiting), others=1)


async def test_status_shows_place_and_wait_of_a_queued_request(front: Front) -> None:
    books, url = Books.open(front.server), front.server.url
    async with crowd(front, 3) as (waiting, outcomes):
        last = outcomes[-1].rid
        place = await asyncio.to_thread(run_headrace, url, "status", "--request", f"chatcmpl-{last}")
        status = json.loads(await asyncio.to_thread(run_headrace, url, "status", "--json"))
    assert re.fullmatch(rf"{last} waits; 2 ahead of it, expected wait \d+ s\n", place)
    [queue] = [queue for queue in status["queues"] if queue["model"] == "narrow"]
    assert queue["waiting"] == 3
    assert 0 < queue["expected_wait_s"] < 60
    await books.settle(await asyncio.gather(*waiting))
    ended = await asyncio.to_thread(run_headrace, url, "status", "--request", last)
    assert ended == f"{last} has ended\n"
