"""The loads. Each takes a client and prompts and gives figures by name: seconds, tokens per second, fractions.

single: one at a time. closedN: N at once, each followed by the next. poisson: open arrivals with lognormal lengths.
prefix: 32 at once that share 1,024 tokens. longprefill: one prompt of 4,000 tokens. mixed: such a prompt arrives while
eight answers are being written.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from benchmarks._percentile import percentile
from benchmarks._serving.client import Answer, Client, Prompts

__all__ = ["SCENARIOS", "Figures"]

Figures = dict[str, float]
Scenario = Callable[[Client, Prompts], Awaitable[Figures]]

LONG_PROMPT = 4000
GOOD_TTFT_S, GOOD_TPOT_S = 1.0, 0.1
POISSON_S = 45.0
MIXED_LEAD_S = 2.0


def _common(answers: Sequence[Answer], seconds: float) -> Figures:
    good = [answer for answer in answers if answer.ok]
    gaps = [gap for answer in good for gap in answer.gaps]
    return {
        "failed": float(len(answers) - len(good)),
        "output tokens/s": sum(answer.tokens for answer in good) / seconds,
        "ttft p50 s": percentile([answer.ttft for answer in good], 0.5),
        "ttft p99 s": percentile([answer.ttft for answer in good], 0.99),
        "tpot p50 ms": 1e3 * percentile([answer.tpot for answer in good], 0.5),
        "gap p99 ms": 1e3 * percentile(gaps, 0.99),
    }


async def single(client: Client, prompts: Prompts) -> Figures:
    """Eight requests, one at a time: prompt 128, output 128."""
    start = time.perf_counter()
    answers = [await client.stream(prompts.make(128), 128) for _ in range(8)]
    return _common(answers, time.perf_counter() - start)


async def closed(concurrency: int, client: Client, prompts: Prompts) -> Figures:
    """`concurrency` at any time, three rounds of them: prompt 256, output 128.

    "steady tokens/s" leaves out the end, where fewer run: it counts what arrived until the first place stayed empty.
    """
    answers: list[Answer] = []
    left = 3 * concurrency
    start = time.perf_counter()
    drained = math.inf

    async def place() -> None:
        nonlocal left, drained
        while left > 0:
            left -= 1
            answers.append(await client.stream(prompts.make(256), 128))
        drained = min(drained, time.perf_counter())

    await asyncio.gather(*[place() for _ in range(concurrency)])
    figures = _common(answers, time.perf_counter() - start)
    full = [answer for answer in answers if answer.ok]
    steady = sum(answer.tokens * sum(at <= drained for at in answer.arrivals) / len(answer.arrivals) for answer in full)
    return {**figures, "steady tokens/s": steady / (drained - start)}


async def poisson(rate: float, client: Client, prompts: Prompts) -> Figures:
    """`rate` arrivals a second for 45 s, the same for every server; prompts around 200, outputs around 120 tokens."""
    rng = random.Random(20)
    plan: list[tuple[float, int, int]] = []
    at = rng.expovariate(rate)
    while at < POISSON_S:
        prompt = min(1024, max(8, int(rng.lognormvariate(math.log(200), 0.9))))
        output = min(512, max(4, int(rng.lognormvariate(math.log(120), 0.8))))
        plan.append((at, prompt, output))
        at += rng.expovariate(rate)
    start = time.perf_counter()

    async def arrive(at: float, prompt: list[int], output: int) -> Answer:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        return await client.stream(prompt, output)

    answers = await asyncio.gather(*[arrive(at, prompts.make(prompt), output) for at, prompt, output in plan])
    good = [answer for answer in answers if answer.ok]
    served = sum(answer.ttft < GOOD_TTFT_S and answer.tpot < GOOD_TPOT_S for answer in good)
    figures = _common(answers, time.perf_counter() - start)
    return {**figures, "goodput %": 100 * served / len(answers), "requests": float(len(answers))}


async def prefix(client: Client, prompts: Prompts) -> Figures:
    """32 at once, 1,024 shared and 32 own prompt tokens, output 32; the shared part is new to the server."""
    shared = prompts.make(1024)
    start = time.perf_counter()
    answers = await asyncio.gather(*[client.stream(shared + prompts.make(32), 32) for _ in range(32)])
    return _common(answers, time.perf_counter() - start)


async def longprefill(client: Client, prompts: Prompts) -> Figures:
    """Three prompts of 4,000 tokens, one at a time, output 8."""
    start = time.perf_counter()
    answers = [await client.stream(prompts.make(LONG_PROMPT), 8) for _ in range(3)]
    figures = _common(answers, time.perf_counter() - start)
    speeds = [LONG_PROMPT / answer.ttft for answer in answers if answer.ok]
    return {**figures, "prompt tokens/s": statistics.median(speeds) if speeds else math.nan}


async def mixed(client: Client, prompts: Prompts) -> Figures:
    """A prompt of 4,000 tokens arrives while eight write 512 each: the worst gap until its first token."""
    running = [Answer(512, 128) for _ in range(8)]
    start = time.perf_counter()
    tasks = [asyncio.create_task(client.stream(prompts.make(128), 512, answer)) for answer in running]
    await asyncio.gather(*[answer.begun.wait() for answer in running])
    await asyncio.sleep(MIXED_LEAD_S)
    arrived = time.perf_counter()
    before = [gap for answer in running for gap in answer.gaps]
    long = await client.stream(prompts.make(LONG_PROMPT), 8)
    until = long.arrivals[0] if long.arrivals else time.perf_counter()
    await asyncio.gather(*tasks)
    during = [
        later - earlier
        for answer in running
        for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        if later >= arrived and earlier <= until
    ]
    figures = _common([*running, long], time.perf_counter() - start)
    return {
        **figures,
        "worst gap ms": 1e3 * max(during, default=math.nan),
        "gap before p50 ms": 1e3 * percentile(before, 0.5),
        "long ttft s": long.ttft if long.arrivals else math.nan,
    }


def scenarios(poisson_rate: float) -> dict[str, Scenario]:
    """All by name. `poisson_rate` in requests a second: 1.2 times what the slowest server of interest can take."""
    return {
        "single": single,
        "closed8": partial(closed, 8),
        "closed32": partial(closed, 32),
        "closed64": partial(closed, 64),
        "prefix": prefix,
        "longprefill": longprefill,
        "mixed": mixed,
        "poisson120": partial(poisson, poisson_rate),
    }


SCENARIOS = tuple(scenarios(1.0))
