"""Limits of one tenant over two pods that meet in Redis only: together they let through what the tenant may have."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.support.api_pod import ApiPod, running_pod
from tests.support.scripted_worker import ScriptedWorker, say

SHARDS = 3


def tenant_file(folder: Path, limits: str) -> Path:
    """One tenant with these limits, whom two users are."""
    path = folder / "tenants.toml"
    path.write_text(f'[tenants.team]\nusers = ["alice", "bob"]\n{limits}\n')
    return path


@asynccontextmanager
async def two_pods(redis_url: str, tenants: Path) -> AsyncIterator[tuple[ApiPod, ApiPod]]:
    """And a worker for each shard."""
    async with AsyncExitStack() as stack:
        for shard in range(SHARDS):
            worker = ScriptedWorker(redis_url, lambda _: say("Hello there"), consumer=f"w{shard}", shard=shard)
            await stack.enter_async_context(worker)
        first, second = [
            await stack.enter_async_context(running_pod(redis_url, tenants=tenants, shards=SHARDS)) for _ in range(2)
        ]
        yield first, second


async def test_requests_a_minute_hold_over_two_pods_together(redis_url: str, tmp_path: Path) -> None:
    limit = 6
    async with two_pods(redis_url, tenant_file(tmp_path, f"requests_per_minute = {limit}")) as pods:
        began = time.monotonic()
        sends = [pod.chat(user=user) for user in ("alice", "bob") * 5 for pod in pods]
        answers = await asyncio.gather(*sends)
        ran_out = (time.monotonic() - began) * limit / 60
        others = [await pod.chat(user="carol") for pod in pods]
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert limit <= statuses[200] <= limit + ran_out
    assert {answer.json()["error"]["type"] for answer in answers if answer.status_code == 429} == {"requests"}
    left = sorted(int(a.headers["x-ratelimit-remaining-requests"]) for a in answers if a.status_code == 200)
    assert left[:limit] == list(range(limit)) or ran_out >= 1, "each counted the others of both pods"
    assert [answer.status_code for answer in others] == [200, 200], "only this tenant is limited"


async def test_tokens_a_minute_hold_over_two_pods_together(redis_url: str, tmp_path: Path) -> None:
    """What the usage of all answers says is what is used up, whichever pod gave them."""
    limit = 300
    async with two_pods(redis_url, tenant_file(tmp_path, f"tokens_per_minute = {limit}")) as pods:
        began, told = time.monotonic(), 0
        for pod, user in itertools.cycle(itertools.product(pods, ("alice", "bob"))):
            answer = await pod.chat("Turn, wheel.", user=user, max_tokens=20)
            ran_out = (time.monotonic() - began) * limit / 60
            left = int(answer.headers["x-ratelimit-remaining-tokens"])
            if answer.status_code == 429:
                break
            usage = answer.json()["usage"]
            asked = usage["prompt_tokens"] + 20
            assert limit - told - asked <= left + 1
            assert left <= limit - told - asked + ran_out + 1
            told += usage["total_tokens"]
            assert told <= limit + ran_out, "the limit does not hold"
    assert answer.json()["error"]["type"] == "tokens"
    assert told + asked > limit, "refused too early"
    assert limit - told <= left <= limit - told + ran_out + 1
