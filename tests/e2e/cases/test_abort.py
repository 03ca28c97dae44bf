"""Cases of kinds abort and ops: clients that leave, and what gauges and counters say afterwards."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.support.api_cases import CHAT, TEXT, body_of, force, metric
from tests.support.stack import Stack
from tests.support.wait import eventually

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(120)]
ENDLESS: dict[str, Any] = {"max_tokens": 4000, **force(260)}
GONE_S = 15.0
"""A machine that does other work as well; the cancellation itself takes a step or two."""


def running(stack: Stack) -> float:
    cards = [card for worker in stack.workers if (card := worker.card()) is not None]
    return sum(card.running + card.waiting + card.kv_blocks_used for card in cards)


async def idle(stack: Stack) -> None:
    await eventually(lambda: running(stack) == 0, GONE_S, what="nothing runs and no block is held")


async def leave_stream(url: str, path: str, body: dict[str, Any]) -> None:
    """Reads one event, then closes the connection."""
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", url + path, json={**body, "stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: ") and ('"content":" ' in line or '"text":" ' in line):
                return


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_abt_02_a_whole_answer_ends_with_its_client(url: str, real_stack: Stack, path: str) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        call = asyncio.create_task(client.post(url + path, json=body_of(path, **ENDLESS)))
        await eventually(lambda: running(real_stack) > 0, GONE_S, what="it runs")
        call.cancel()
    await idle(real_stack)


async def test_abt_04_all_choices_end_with_their_client(url: str, real_stack: Stack) -> None:
    await leave_stream(url, CHAT, body_of(CHAT, n=4, **ENDLESS))
    await idle(real_stack)
    await leave_stream(url, TEXT, body_of(TEXT, prompt=["A", "B"], n=2, **ENDLESS))
    await eventually(lambda: metric([url], "headrace_pod_requests") == 0, GONE_S, what="the pod let them go")
    await idle(real_stack)


async def test_abt_06_07_queued_requests_of_dead_clients_are_dropped(url: str, real_stack: Stack) -> None:
    """Both workers stand still while 24 requests are queued and left; then they find next to nothing to do."""
    await idle(real_stack)
    urls = [url]
    before = metric(urls, "vllm:prompt_tokens_total")
    for worker in real_stack.workers:
        worker.stop()
    try:
        async with httpx.AsyncClient(timeout=60) as client:
            calls = [
                asyncio.create_task(client.post(url + CHAT, json=body_of(CHAT, stream=i % 2 == 0, **ENDLESS)))
                for i in range(24)
            ]
            waiting = lambda: metric(urls, "headrace_pod_requests") == 24  # noqa: E731
            await eventually(waiting, GONE_S, what="the pod carries them")
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await eventually(lambda: metric(urls, "headrace_pod_requests") == 0, GONE_S, what="the pod let them go")
    finally:
        for worker in real_stack.workers:
            worker.cont()
    await idle(real_stack)
    await eventually(lambda: metric(urls, "vllm:num_requests_waiting") == 0, GONE_S, what="the queue is empty")
    # What a worker's blocked read had already been handed may have begun: at most a read's worth.
    assert metric(urls, "vllm:prompt_tokens_total") - before <= 24 * 31
    await eventually(lambda: metric(urls, "vllm:kv_cache_usage_perc") == 0, GONE_S, what="the pod saw the cache freed")


async def test_abt_08_aborts_are_counted(url: str, real_stack: Stack) -> None:
    urls = [url]
    names = ("vllm:request_success_total", "headrace_requests_total")
    before = [metric(urls, name, finished_reason="abort") for name in names]
    await asyncio.gather(*(leave_stream(url, CHAT, body_of(CHAT, **ENDLESS)) for _ in range(5)))
    for name, count in zip(names, before, strict=True):
        await eventually(
            lambda name=name, count=count: metric(urls, name, finished_reason="abort") == count + 5,
            GONE_S,
            what=f"{name} counts five aborts",
        )
    total = metric(urls, "vllm:request_success_total")
    assert metric(urls, "vllm:e2e_request_latency_seconds_count") == total
    await idle(real_stack)


async def test_ops_03_health_answers_under_load(url: str, real_stack: Stack) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        calls = [asyncio.create_task(client.post(url + CHAT, json=body_of(CHAT, max_tokens=12))) for _ in range(40)]
        slowest = 0.0
        while not all(call.done() for call in calls):
            began = time.monotonic()
            assert (await client.get(f"{url}/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.1)
        assert all(call.result().status_code == 200 for call in calls)
    assert slowest < 2.0
    await idle(real_stack)


def test_own_histograms_stand_beside_vllms_names(url: str) -> None:
    for name in ("headrace_commit_seconds", "headrace_queue_age_seconds", "vllm:time_to_first_token_seconds"):
        assert metric([url], f"{name}_count") > 0
    for name in ("headrace_takeovers_total", "headrace_relay_gaps_total"):
        assert name in httpx.get(f"{url}/metrics").text
