"""The load of the chaos suite: request bodies of every kind, their undisturbed answers, and who is killed when.

In: a seed. Out: bodies for /v1/completions and /v1/chat/completions that end by length (or by a stop string cut out of the
body's own undisturbed text, across token borders), so that what each must answer is known before anything is killed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

__all__ = ["Expected", "Load", "make_bodies", "undisturbed", "with_stops"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


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
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=concurrency)) as client:

        async def one(load: Load) -> Expected:
            async with gate:
                response = await client.post(url + load.path, json=load.body)
            assert response.status_code == 200, response.text
            answer = response.json()
            choices = answer["choices"]
            texts = {c["index"]: c["message"]["content"] if "message" in c else c["text"] for c in choices}
            return Expected(load, texts, {c["index"]: c["finish_reason"] for c in choices}, answer["usage"])

        return list(await asyncio.gather(*map(one, loads)))
