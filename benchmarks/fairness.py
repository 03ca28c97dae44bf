"""What a greedy tenant and batch work do to the others, over several real workers.

Share: tenants that stay below their share, alone and beside one that sends ten times its share; then all of them with a
backlog. Classes: interactive requests alone and while batch work saturates the fleet; batch work alone. Bursts: many
requests at once to idle workers. Steps: what rows and prompts cost, client to client, for `benchmarks.classes_model`.
Prints the figures and exits with 1 when a target is missed. The model is a random tiny one unless named; its steps take
`--step-ms` whatever is in them, as on an accelerator.

    python -m benchmarks.fairness [--model tiny|default|DIR] [--workers 2] [--seats 16] [--seconds 20]
                                  [--only classes,shares,bursts,steps] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks._percentile import percentile
from benchmarks._tenant_load import Sample, Sender, jain, random_prompt, served_between, stack
from tests.support.tiny_model import make_tiny_llama

QUIET = [f"quiet-{i}" for i in range(4)]
FLOOD = "flood"
_BATCH = "batch"


class Run:
    """The scenarios against one stack."""

    def __init__(self, base_url: str, model: str, args: argparse.Namespace) -> None:
        self._base_url, self._model, self._args = base_url, model, args
        self._rng = random.Random(7)

    def _prompt(self) -> list[int]:
        return random_prompt(self._rng, self._args.prompt)

    async def capacity(self) -> float:
        """Requests per second of the whole fleet with every seat taken."""
        samples = await self._closed({"all": self._args.workers * self._args.seats})
        return len(samples) / (max(one.arrivals[-1] for one in samples) - min(one.sent for one in samples))

    async def quiet(self, per_s: float, flood: int) -> list[Sample]:
        """Samples of the quiet tenants, each at its own rate, beside `flood` requests in flight of another one."""
        async with Sender(self._base_url, self._model) as sender, asyncio.TaskGroup() as group:
            until = time.monotonic() + self._args.seconds
            for _ in range(flood):
                group.create_task(sender.closed_loop(FLOOD, until, self._prompt, self._args.output))
            await asyncio.sleep(self._args.seconds / 10)  # the flood is at its height when the others come
            for name in QUIET:
                rng = random.Random(name)
                group.create_task(sender.at_rate(name, until, per_s, rng, self._prompt, self._args.output))
        return [one for one in sender.samples if one.tenant != FLOOD]

    async def backlogged(self, in_flight: dict[str, int]) -> float:
        """Jain index of tokens while each tenant has more waiting than it can be served."""
        samples = await self._closed(in_flight)
        start = min(one.sent for one in samples) + self._args.seconds / 4
        served = served_between(samples, start, min(one.sent for one in samples) + self._args.seconds)
        print("  tokens: " + ", ".join(f"{name} {tokens:.0f}" for name, tokens in sorted(served.items())))
        return jain(list(served.values()))

    async def classes(self, per_s: float, batch: int) -> tuple[list[Sample], float]:
        """Interactive samples beside so much batch work in flight, and tokens a second of all."""
        async with Sender(self._base_url, self._model) as sender, asyncio.TaskGroup() as group:
            until = time.monotonic() + self._args.seconds
            for _ in range(batch):
                group.create_task(sender.closed_loop(_BATCH, until, self._prompt, self._args.output, batch=True))
            start = time.monotonic() + self._args.seconds / 10
            await asyncio.sleep(self._args.seconds / 10)
            if per_s:
                rng = random.Random(3)
                group.create_task(sender.at_rate(QUIET[0], until, per_s, rng, self._prompt, self._args.output))
        served = served_between(sender.samples, start, until)
        return [one for one in sender.samples if one.tenant != _BATCH], sum(served.values()) / (until - start)

    async def bursts(self, count: int) -> tuple[list[Sample], float]:
        """Samples of requests that come `count` at once, again and again once all have ended; and mean seconds of one
        such burst."""
        async with Sender(self._base_url, self._model) as sender:
            start, done = time.monotonic(), 0
            while time.monotonic() < start + self._args.seconds:
                async with asyncio.TaskGroup() as group:
                    for _ in range(count):
                        group.create_task(sender.send(QUIET[0], self._prompt(), self._args.output))
                done += 1
            return sender.samples, (time.monotonic() - start) / done

    async def decodes(self, count: int) -> float:
        """Median seconds between two tokens while so many streams run and none begins."""
        async with Sender(self._base_url, self._model) as sender, asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(sender.send(QUIET[0], self._prompt(), 2 * self._args.output))
        begun = max(one.arrivals[0] for one in sender.samples)
        gaps = [b - a for one in sender.samples for a, b in pairwise(one.arrivals) if a > begun]
        return percentile(gaps, 0.5)

    async def prompt_token(self) -> float:
        """Seconds that a token of a prompt adds to the time to first token."""
        ttft: dict[int, list[float]] = {1: [], 4: []}
        async with Sender(self._base_url, self._model) as sender:
            for times in [1, 4] * 6:
                prompt = random_prompt(self._rng, times * self._args.prompt)
                ttft[times].append((await sender.send(QUIET[0], prompt, 1)).ttft)
        return (percentile(ttft[4], 0.5) - percentile(ttft[1], 0.5)) / (3 * self._args.prompt)

    async def _closed(self, in_flight: dict[str, int]) -> list[Sample]:
        async with Sender(self._base_url, self._model) as sender, asyncio.TaskGroup() as group:
            until = time.monotonic() + self._args.seconds
            for name, count in in_flight.items():
                for _ in range(count):
                    group.create_task(sender.closed_loop(name, until, self._prompt, self._args.output))
        return sender.samples


def _ttft(samples: list[Sample]) -> float:
    return percentile([one.ttft for one in samples], 0.95)


def _itl(samples: list[Sample]) -> float:
    return percentile([gap for one in samples for gap in one.gaps], 0.95)


async def measure_shares(run: Run, args: argparse.Namespace) -> bool:
    """Whether tenants got what is theirs."""
    seats = args.workers * args.seats
    capacity = await run.capacity()
    share = capacity / (len(QUIET) + 1)
    print(f"capacity {capacity:.1f} requests/s of {args.prompt} + {args.output} tokens; a share is {share:.2f}")
    rate = args.quiet_load * share
    alone, beside = await run.quiet(rate, 0), await run.quiet(rate, 10 * seats // (len(QUIET) + 1))
    ratio = _ttft(beside) / _ttft(alone)
    print(f"quiet tenants' TTFT p95: alone {1e3 * _ttft(alone):.0f} ms ({len(alone)}), beside a flood "
          f"{1e3 * _ttft(beside):.0f} ms ({len(beside)}): {ratio:.2f} times (target 1.3)")  # fmt: skip
    index = await run.backlogged({FLOOD: 5 * seats} | dict.fromkeys(QUIET, seats // 2))
    print(f"Jain index of tokens while all are backlogged, one with ten times as much: {index:.3f} (target 0.95)")
    return ratio <= 1.3 and index >= 0.95


async def measure_classes(run: Run, args: argparse.Namespace) -> bool:
    """Whether batch work kept out of the way of interactive requests and lost little by it.

    Batch alone comes first: for half a minute after an interactive request its steps are kept short.
    """
    batch = 3 * args.workers * args.seats
    _, batch_alone = await run.classes(0.0, batch)
    rate = args.quiet_load * batch_alone / (args.prompt + args.output)
    calm, _ = await run.classes(rate, 0)
    busy, together = await run.classes(rate, batch)
    ttft, itl = _ttft(busy) / _ttft(calm), _itl(busy) / _itl(calm)
    print(f"{len(calm)} and {len(busy)} interactive requests, {rate:.2f}/s, without and beside batch work: TTFT p95 "
          f"{1e3 * _ttft(calm):.0f}, {1e3 * _ttft(busy):.0f} ms: {ttft:.2f} times (target 1.1); "
          f"ITL p95 {1e3 * _itl(calm):.1f}, {1e3 * _itl(busy):.1f} ms: {itl:.2f} times (target 1.1)")  # fmt: skip
    part = together / batch_alone
    print(f"tokens/s: batch alone {batch_alone:.0f}, together {together:.0f}: {part:.2f} (target 0.95)")
    return ttft <= 1.1 and itl <= 1.1 and part >= 0.95


async def measure_bursts(run: Run, args: argparse.Namespace) -> bool:
    """Requests at once, as many as one worker has seats. No target: to be compared with another version."""
    samples, seconds = await run.bursts(args.seats)
    ttft = [one.ttft for one in samples]
    print(f"bursts of {args.seats}: {1e3 * seconds:.0f} ms each ({len(samples)} requests), "
          f"TTFT p50 {1e3 * percentile(ttft, 0.5):.0f}, p95 {1e3 * percentile(ttft, 0.95):.0f} ms")  # fmt: skip
    return True


async def measure_steps(run: Run, args: argparse.Namespace) -> bool:
    """Nothing to be missed."""
    counts = sorted({1, args.seats // 4, args.seats // 2, args.seats})
    times = [min([await run.decodes(count) for _ in range(2)]) for count in counts]
    print("decodes: " + ", ".join(f"{n} {1e3 * t:.1f} ms" for n, t in zip(counts, times, strict=True)))
    print(f"a token of a prompt: {1e3 * await run.prompt_token():.3f} ms")
    return True


SCENES = {
    "classes": measure_classes,
    "shares": measure_shares,
    "bursts": measure_bursts,
    "steps": measure_steps,
}


async def measure(base_url: str, model: str, args: argparse.Namespace) -> bool:
    """Whether every target was met."""
    chosen = [SCENES[name] for name in args.only.split(",")]
    good = [await scene(Run(base_url, model, args), args) for scene in chosen]
    return all(good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny (random), default (the real one), or a model directory")
    parser.add_argument("--only", default="classes,shares,bursts", help=f"of {', '.join(SCENES)}; several with commas")
    parser.add_argument("--dtype", help="of the worker, if not its usual one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seats", type=int, default=16, help="sequences of one worker")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each scenario")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument(
        "--quiet-load", type=float, default=0.5, help="what quiet tenants send, as a part of their share"
    )
    parser.add_argument("--target-itl-ms", type=float, default=0.0)
    parser.add_argument(
        "--step-ms", type=int, default=40, help="least time of a step of the tiny model: no benchmark of the client"
    )
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - SCENES.keys():
        parser.error(f"--only {args.only}: unknown are {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        named = {"tiny": str(make_tiny_llama(Path(folder) / "model")), "default": ""}
        model = named.get(args.model, args.model)
        options: dict[str, object] = {"max_num_seqs": args.seats, "served_model_name": "bench"}
        if args.model == "tiny":
            options["fault"] = f"step-delay-ms:{args.step_ms}"
        if args.dtype:
            options["dtype"] = args.dtype
        if args.target_itl_ms:
            options["target_itl_ms"] = args.target_itl_ms
        with stack(model, args.workers, **options) as up:
            good = asyncio.run(measure(up.pods[0].base_url, "bench", args))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
