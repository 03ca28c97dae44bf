"""Load by tenants for the queue's benchmarks: a stack of real processes, and clients that note times and tokens.

In: how many workers, prompts of token ids, who sends them. Out: `Sample`s. Prompts are seeded; the end-of-sequence
token is ignored, so that every answer has the length that was asked for.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from tests.support.redis_server import RedisServer
from tests.support.stack import Stack

__all__ = ["Sample", "Sender", "jain", "random_prompt", "served_between", "stack"]

_FIRST_TOKEN, _LAST_TOKEN = 100, 300
"""Ids that every model has as ordinary tokens."""


@dataclass(slots=True)
class Sample:
    """One answer; times in seconds of time.monotonic."""

    tenant: str
    sent: float
    rid: str = ""
    arrivals: list[float] = field(default_factory=list)
    """Of events with tokens."""
    prompt_tokens: int = 0
    tokens: int = 0
    cached: int = 0

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


@contextmanager
def stack(model: str, workers: int, *, pod_env: Mapping[str, str] | None = None, **settings: object) -> Iterator[Stack]:
    """A Redis, so many workers and one pod; `settings` are those of a worker."""
    env = {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()}
    pod_env = {"HEADRACE_MAX_QUEUE_REQUESTS": "100000", "HEADRACE_MAX_STREAMS": "100000", **(pod_env or {})}
    with (
        RedisServer() as server,
        Stack(server.url, model, pods=1, workers=workers, worker_env=env, pod_env=pod_env) as up,
    ):
        yield up


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(tokens)]


class Sender:
    """Sends completions and collects their samples. `async with Sender(base_url, model) as sender:`"""

    def __init__(self, base_url: str, model: str) -> None:
        """`base_url` ends with /v1."""
        self._url = f"{base_url}/completions"
        self._model = model
        self.samples: list[Sample] = []

    async def __aenter__(self) -> Sender:
        self._client = httpx.AsyncClient(timeout=600, trust_env=False, limits=httpx.Limits(max_connections=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def send(self, tenant: str, prompt: Sequence[int], tokens: int, *, batch: bool = False) -> Sample:
        """One streamed answer of exactly so many tokens. Raises RuntimeError for anything else."""
        sample = Sample(tenant, time.monotonic(), prompt_tokens=len(prompt))
        self.samples.append(sample)
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # so that a token without text, a part of a character, is an event, too
            "user": tenant,
            "service_tier": "flex" if batch else "auto",
        }
        async with self._client.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._note(sample, json.loads(line[6:]))
        if sample.tokens != tokens:
            raise RuntimeError(f"{sample.tokens} tokens instead of {tokens}")
        return sample

    @staticmethod
    def _note(sample: Sample, chunk: dict[str, object]) -> None:
        sample.rid = str(chunk["id"]).rpartition("-")[2]
        if chunk.get("choices"):
            sample.arrivals.append(time.monotonic())
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            sample.tokens = usage["completion_tokens"]
            sample.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    async def closed_loop(
        self, tenant: str, until: float, prompt: Callable[[], list[int]], tokens: int, **kind: bool
    ) -> None:
        """The next one as soon as the last one has ended."""
        while time.monotonic() < until:
            await self.send(tenant, prompt(), tokens, **kind)

    async def at_rate(
        self, tenant: str, until: float, per_s: float, rng: random.Random, prompt: Callable[[], list[int]], tokens: int
    ) -> None:
        """A Poisson stream of requests, whatever becomes of them."""
        async with asyncio.TaskGroup() as group:
            while (now := time.monotonic()) < until:
                group.create_task(self.send(tenant, prompt(), tokens))
                await asyncio.sleep(max(0.0, now + rng.expovariate(per_s) - time.monotonic()))


def served_between(samples: Iterable[Sample], start: float, end: float) -> dict[str, float]:
    """Tokens that each tenant was served in a time: prompts with their first token, answers as they came."""
    served: dict[str, float] = {}
    for one in samples:
        if not one.arrivals:
            continue
        got = one.prompt_tokens - one.cached if start <= one.arrivals[0] < end else 0.0
        got += one.tokens * sum(start <= at < end for at in one.arrivals) / len(one.arrivals)
        served[one.tenant] = served.get(one.tenant, 0.0) + got
    return served


def jain(values: Sequence[float]) -> float:
    """1 = all alike, 1 / n = one has everything (Jain, Chiu, Hawe 1984)."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))
