"""The load of the chaos suite: request bodies of every kind, and their undisturbed answers.

In: a seed. Out: bodies for /v1/completions and /v1/chat/completions that end by length (or by a stop string cut out of
the body's own undisturbed text, across token borders), so that what each must answer is known before anything dies.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine_worker.models.loading.loader import load
from tests.support.api_pod import running_pod
from tests.support.redis_server import RedisServer
from tests.support.stream_client import Outcome, follow
from tests.support.workers import running_worker

__all__ = ["Expected", "Load", "Oracle", "follow_all", "make_bodies", "undisturbed", "with_stops"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODEL = "tiny"
WORDS = ("water", "wheel", "mill", "river", "stone", "turns", "by", "night", "and", "day", "été", "水车", "🌊")


@dataclass(frozen=True)
class Load:
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """What a client must have in the end, however often its stream was cut."""

    load: Load
    texts: dict[int, str]
    finish: dict[int, str]
    usage: dict[str, Any]


def make_bodies(count: int, model: str, *, seed: int, max_tokens: tuple[int, int], words: Sequence[str]) -> list[Load]:
    """`count` different requests: greedy and seeded, one choice and two, text, token ids and chat."""
    rng = random.Random(seed)
    loads = []
    for number in range(count):
        body: dict[str, Any] = {"model": model, "max_tokens": rng.randint(*max_tokens), "ignore_eos": True}
        prompt = " ".join(rng.choice(words) for _ in range(rng.randint(1, 12)))
        if number % 2:
            body |= {"temperature": 1.0, "seed": rng.randrange(1 << 40), "top_p": rng.choice([1.0, 0.9])}
        else:
            body |= {"temperature": 0}
        if number % 5 == 0:
            body |= {"n": 2}
        if number % 7 == 0:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3}
        if number % 3 == 0:
            loads.append(Load(CHAT, body | {"messages": [{"role": "user", "content": prompt}]}))
        else:
            loads.append(Load(COMPLETIONS, body | {"prompt": prompt}))
    return loads


def with_stops(answers: Sequence[Expected]) -> list[Load]:
    """The same requests, a third of them with a stop string that occurs in the middle of their own first answer."""
    loads = []
    for number, answer in enumerate(answers):
        text = answer.texts[0]
        stop = text[len(text) // 2 : len(text) // 2 + 5]
        usable = number % 3 == 1 and len(stop) == 5 and "�" not in stop
        body = answer.load.body | ({"stop": [stop]} if usable else {})
        loads.append(Load(answer.load.path, body))
    return loads


async def undisturbed(url: str, loads: Sequence[Load], *, concurrency: int = 64) -> list[Expected]:
    """The non-streamed answers of a stack that nobody harms."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False, verify=False) as client:

        async def one(load: Load) -> Expected:
            async with gate:
                response = await client.post(url + load.path, json=load.body)
            assert response.status_code == 200, response.text
            answer = response.json()
            choices = answer["choices"]
            texts = {c["index"]: c["message"]["content"] if "message" in c else c["text"] for c in choices}
            return Expected(load, texts, {c["index"]: c["finish_reason"] for c in choices}, answer["usage"])

        return list(await asyncio.gather(*map(one, loads)))


class Oracle:
    """The undisturbed answers of a model, from a pod and a worker in this process that nobody harms or slows down."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._known: dict[tuple[int, tuple[int, int]], list[Expected]] = {}

    async def expected(self, count: int, max_tokens: tuple[int, int]) -> list[Expected]:
        """`count` requests of every kind, a third of them with stop strings. Asked for once in a run."""
        key = (count, max_tokens)
        if key not in self._known:
            loads = make_bodies(count, MODEL, seed=11, max_tokens=max_tokens, words=WORDS)
            self._known[key] = await self.answers(loads)
        return self._known[key]

    async def answers(self, loads: Sequence[Load]) -> list[Expected]:
        """The undisturbed answers to `loads`, a third of which get a stop string."""
        loaded = load(str(self._model), dtype="float32", device="cpu")
        settings = {"max_num_seqs": 64, "kv_cache_memory": 64 << 20, "threads": 1}
        with RedisServer() as server:
            async with running_worker(server.url, loaded, **settings), running_pod(server.url) as pod:
                plain = await undisturbed(pod.url, loads)
                return await undisturbed(pod.url, with_stops(plain))


async def follow_all(
    urls: Sequence[str],
    expected: Sequence[Expected],
    *,
    outcomes: Sequence[Outcome] | None = None,
    headers: dict[str, str] | None = None,
    deadline_s: float = 60.0,
) -> list[Outcome | BaseException]:
    """All requests at once, each followed to its end over any of the pods. `outcomes`: filled while they run."""
    places = outcomes if outcomes is not None else [Outcome() for _ in expected]

    async def one(number: int) -> Outcome:
        load = expected[number].load
        options: dict[str, Any] = {"deadline_s": deadline_s, "headers": headers, "outcome": places[number]}
        return await follow(lambda: urls, load.path, load.body, seed=number, **options)

    return await asyncio.gather(*map(one, range(len(expected))), return_exceptions=True)
