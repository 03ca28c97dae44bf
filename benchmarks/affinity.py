"""Requests that share prefixes of skewed popularity, over several real workers: how often one is found cached.

20 prefixes with Zipf popularity, each request with a tail of its own. Three ways to spread the same requests at the
same times: by Headrace; "any", the same with affinity off; and "sticky", every prefix to the worker its hash names.
Hits are measured against perfect stickiness: every request goes to the worker that has its prefix, in caches of the
same size (`_stickiness.py`). Prints hits, why the others missed, and TTFT; exits with 1 when a target is missed. The
model is a random tiny one unless named.

    python -m benchmarks.affinity [--model tiny|default|DIR] [--workers 2] [--requests 400] [--prefix 512]
                                  [--load 0.6 | --rate 5] [--cache 64M] [--dtype bfloat16] [--ways headrace,any,sticky]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks._percentile import percentile
from benchmarks._stickiness import perfect_hits
from benchmarks._tenant_load import Sample, Sender, random_prompt, stack
from shared.keys import request_key
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack
from tests.support.tiny_model import make_tiny_llama

_PREFIXES = 20
_SKEW = 1.1
_TAIL = 32
_BLOCK = 16
_SETTLE_S = 2.0
"""Until a pod has seen every worker."""


@dataclass(frozen=True)
class Call:
    prefix: int
    prompt: list[int]
    at: float
    """Seconds from the start."""


def calls(count: int, prefix: int, per_s: float, seed: int) -> list[Call]:
    """The same requests at the same times for every way to spread them."""
    rng = random.Random(seed)
    prefixes = [random_prompt(rng, prefix) for _ in range(_PREFIXES)]
    weights = [1 / (rank + 1) ** _SKEW for rank in range(_PREFIXES)]
    made, at = [], 0.0
    for chosen in rng.choices(range(_PREFIXES), weights, k=count):
        made.append(Call(chosen, prefixes[chosen] + random_prompt(rng, _TAIL), at))
        at += rng.expovariate(per_s)
    return made


async def play(todo: list[Call], output: int, sender_of: Callable[[Call], Sender]) -> list[Sample]:
    samples: list[Sample] = []

    async def one(call: Call) -> None:
        samples.append(await sender_of(call).send(f"prefix-{call.prefix}", call.prompt, output))

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for call in todo:
            await asyncio.sleep(max(0.0, start + call.at - time.monotonic()))
            group.create_task(one(call))
    return samples


async def through(up: Stack, todo: list[Call], output: int) -> list[Sample]:
    """Everything to one pod; Headrace spreads it."""
    async with Sender(up.pods[0].base_url, "bench") as sender:
        return await play(todo, output, lambda _: sender)


async def sticky(url: list[str], todo: list[Call], output: int) -> list[Sample]:
    """A router in front of services of one worker each."""
    senders = [await Sender(one, "bench").__aenter__() for one in url]
    try:

        def chosen(call: Call) -> Sender:
            digest = hashlib.sha256(str(call.prompt[:64]).encode()).digest()
            return senders[digest[0] % len(senders)]

        return await play(todo, output, chosen)
    finally:
        for sender in senders:
            await sender.__aexit__()


def report(name: str, ran: list[tuple[Sample, str]], best: int) -> tuple[float, float]:
    """(tokens found as a part of what perfect stickiness finds, TTFT p99 in seconds); `ran` with who ran each."""
    samples = [one for one, _ in ran]
    part, ttft = sum(one.cached for one in samples) / best, [one.ttft for one in samples]
    late = [one.ttft for one in sorted(samples, key=lambda one: one.sent)[len(samples) // 4 :]]
    print(f"{name:8} hits {100 * part:5.1f} % of perfect stickiness; TTFT ms p50 {1e3 * percentile(ttft, 0.5):.0f}, "
          f"p99 {1e3 * percentile(ttft, 0.99):.0f}; without the first quarter p50 {1e3 * percentile(late, 0.5):.0f}, "
          f"p99 {1e3 * percentile(late, 0.99):.0f}")  # fmt: skip
    shares = Counter(worker for _, worker in ran)
    print(f"         requests by worker {sorted(shares.values())}; not found: {dict(reasons(ran))}")
    return part, percentile(ttft, 0.99)


def reasons(ran: Sequence[tuple[Sample, str]]) -> Counter[str]:
    """Why requests did not find their whole prefix, by what was sent where before them."""
    why: Counter[str] = Counter()
    seen: dict[str, list[tuple[Sample, str]]] = {}
    whole = max(one.cached for one, _ in ran)
    for one, worker in sorted(ran, key=lambda pair: pair[0].sent):
        before = seen.setdefault(one.tenant, [])
        here = [other for other, there in before if there == worker]
        if one.cached < whole:
            if not before:
                why["first use"] += 1
            elif not here:
                why["only the other worker had it"] += 1
            elif all(other.arrivals[0] > one.sent for other in here):
                why["was being computed"] += 1
            else:
                why["evicted"] += 1
        before.append((one, worker))
    return why


def ran_where(urls: Sequence[str], samples: Sequence[Sample]) -> list[tuple[Sample, str]]:
    """With the worker that ran each, as the Redis of its service remembers."""
    found = []
    clients = [redis.Redis.from_url(url) for url in urls]
    for one in samples:
        holders = [client.hget(request_key(one.rid), "holder") for client in clients]
        found.append((one, next(str(holder) for holder in holders if holder)))
    for client in clients:
        client.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny (random), default (the real one), or a model directory")
    parser.add_argument("--dtype", help="of the workers, if not their usual one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seats", type=int, default=16, help="sequences of one worker")
    parser.add_argument("--cache", default="64M", help="memory of one worker's cache")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prefix", type=int, default=512, help="tokens that requests share")
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--load", type=float, default=0.6, help="arrivals as a part of what the fleet can do")
    parser.add_argument("--rate", type=float, help="arrivals a second, instead of --load")
    parser.add_argument("--ways", default="headrace,any,sticky", help="which to run; the first two need no --rate")
    parser.add_argument(
        "--step-ms", type=int, default=40, help="least time of a step of the tiny model: no benchmark of the client"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny_llama(Path(folder) / "model", max_position_embeddings=4096)
        named = {"tiny": str(tiny), "default": ""}
        return _run(named.get(args.model, args.model), args)


def _options(args: argparse.Namespace) -> dict[str, object]:
    options: dict[str, object] = {"max_num_seqs": args.seats, "served_model_name": "bench", "block_size": _BLOCK}
    options["kv_cache_memory"] = args.cache
    if args.model == "tiny":
        options["fault"] = f"step-delay-ms:{args.step_ms}"
    if args.dtype:
        options["dtype"] = args.dtype
    return options


def _run(model: str, args: argparse.Namespace) -> int:
    rate = args.rate or args.load * _capacity(model, args)
    todo = calls(args.requests, args.prefix, rate, seed=2)
    print(f"{args.requests} requests at {rate:.1f}/s, {_PREFIXES} prefixes of {args.prefix} tokens")
    results: dict[str, tuple[float, float]] = {}
    for way in args.ways.split(","):
        ran, blocks = (_sticky_run if way == "sticky" else _headrace_run)(model, args, todo, way)
        best = perfect_hits(
            [call.prefix for call in todo],
            workers=args.workers,
            blocks=blocks,
            block=_BLOCK,
            shared=args.prefix,
            rest=_TAIL + args.output,
        )
        results[way] = report(way, ran, best)
    if not {"headrace", "sticky"} <= results.keys():
        return 0
    (part, p99), (_, sticky_p99) = results["headrace"], results["sticky"]
    first = len({call.prefix for call in todo}) * (args.prefix // _BLOCK * _BLOCK)
    whole = args.requests * (args.prefix // _BLOCK * _BLOCK)
    print(f"{blocks} blocks a worker; perfect stickiness finds {best} of {whole} tokens, {first} are of first uses")
    print(f"targets: hits at least 90 % ({100 * part:.1f} %), TTFT p99 below sticky's ({p99 / sticky_p99:.2f} times)")
    return 0 if part >= 0.9 and p99 < sticky_p99 else 1


def _capacity(model: str, args: argparse.Namespace) -> float:
    """Requests a second of the whole fleet with every seat taken."""
    warm = calls(args.requests // 2, args.prefix, 1e6, seed=1)
    with stack(model, args.workers, **_options(args)) as up:
        time.sleep(_SETTLE_S)
        start = time.monotonic()
        asyncio.run(through(up, warm, args.output))
        return len(warm) / (time.monotonic() - start)


_Ran = tuple[list[tuple[Sample, str]], int]
"""Samples with who ran them, and blocks of one worker."""


def _headrace_run(model: str, args: argparse.Namespace, todo: list[Call], way: str) -> _Ran:
    pod_env = {"HEADRACE_PREFIX_AFFINITY": "false" if way == "any" else "true"}
    with stack(model, args.workers, pod_env=pod_env, **_options(args)) as up:
        time.sleep(_SETTLE_S)
        samples = asyncio.run(through(up, todo, args.output))
        return ran_where([up.redis_url], samples), _blocks(up)


def _sticky_run(model: str, args: argparse.Namespace, todo: list[Call], _way: str) -> _Ran:
    env = {f"HEADRACE_{name.upper()}": str(value) for name, value in _options(args).items()}
    with ExitStack() as opened:
        urls = [opened.enter_context(RedisServer()).url for _ in range(args.workers)]
        stacks = [opened.enter_context(Stack(url, model, pods=1, workers=1, worker_env=env)) for url in urls]
        time.sleep(_SETTLE_S)
        samples = asyncio.run(sticky([one.pods[0].base_url for one in stacks], todo, args.output))
        return ran_where(urls, samples), _blocks(stacks[0])


def _blocks(up: Stack) -> int:
    card = up.workers[0].card()
    assert card is not None
    return card.kv_blocks_total


if __name__ == "__main__":
    sys.exit(main())
