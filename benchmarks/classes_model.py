"""What batch work costs interactive requests and what it loses by them, on a machine whose step times are a formula.

The real scheduler under Poisson arrivals, in made-up time: minutes of load in a second, so that ways to plan a step can
be compared without the noise of a machine. A step takes a fixed time, so much per generating row and per prompt token,
and varies by 6 %. The defaults are near SmolLM2-135M in bfloat16 on two cores. Prints figures like those of
`benchmarks.fairness --only classes`, and how long steps would have to be for 0.95 of the throughput.

    python -m benchmarks.classes_model [--load 0.5] [--step-ms 12.5] [--row-ms 0.9] [--prompt-token-ms 0.33]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks._engine_run import make_request
from benchmarks._percentile import percentile
from engine_worker.cache.manager import CacheManager
from engine_worker.config import EngineConfig
from engine_worker.plan import BatchPlan
from engine_worker.request import Klass
from engine_worker.scheduling.scheduler import Scheduler

_NOISE, _HICCUPS, _HICCUP = 0.06, 0.01, 1.6
"""Spread of a step's time, and one step in a hundred that takes 1.6 times as long."""
_WARM = 0.1
"""The first part of each run, which does not count."""


@dataclass
class Load:
    """What one run saw; seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    """Prompts with their first token, answers as they came; of both classes."""
    seconds: float = 0.0
    """In which `tokens` and `steps` were counted."""


class Machine:
    """One engine without a model."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self._args = args
        self._rng = random.Random(seed)
        config = EngineConfig(max_num_seqs=args.seats)
        self._scheduler = Scheduler(config, CacheManager(100_000, 16, enable_prefix_caching=True), 8192)
        self._now = 0.0
        self._times: dict[str, tuple[Klass, list[float]]] = {}
        """Of every unfinished request: when it came, then its tokens."""
        self._count = 0
        self._seen = Load()

    def run(self, per_s: float, batch: bool) -> Load:
        """Interactive requests at this rate, beside batch work for every empty seat if wanted."""
        start, end = self._args.seconds * _WARM, self._args.seconds
        due = start
        while self._now < end:
            while per_s and due <= self._now:
                self._add("interactive", due)
                due += self._rng.expovariate(per_s)
            while batch and len(self._times) < self._args.seats:
                self._add("batch", self._now)
            if (plan := self._scheduler.schedule()) is None:
                self._now = due
                continue
            seconds = self._seconds(plan)
            self._now += seconds
            self._scheduler.took(seconds)
            self._seen.steps += self._now >= start
            self._apply(plan, counts=self._now >= start)
        self._seen.seconds = self._now - start
        return self._seen

    def _add(self, klass: Klass, at: float) -> None:
        self._count += 1
        prompt = [self._rng.randrange(1, 50_000) for _ in range(self._args.prompt)]
        request = make_request(str(self._count), prompt, self._args.output, klass)
        request.arrival = self._count
        self._scheduler.add(request)
        self._times[request.request_id] = klass, [at]

    def _seconds(self, plan: BatchPlan) -> float:
        args, prompts = self._args, [row.num_new_tokens for row in plan.rows if row.num_new_tokens > 1]
        ms = args.step_ms + args.row_ms * (len(plan.rows) - len(prompts)) + args.prompt_token_ms * sum(prompts)
        hiccup = _HICCUP if self._rng.random() < _HICCUPS else 1.0
        return float(ms) / 1000 * hiccup * self._rng.lognormvariate(0, _NOISE)

    def _apply(self, plan: BatchPlan, *, counts: bool) -> None:
        for row in plan.rows:
            request = self._scheduler.get(row.request_id)
            assert request is not None
            self._scheduler.advance(request, row.num_new_tokens)
            if not row.samples:
                continue
            klass, times = self._times[row.request_id]
            times.append(self._now)
            if counts:
                self._seen.tokens += 1 + (self._args.prompt if len(times) == 2 else 0)
            request.output_token_ids.append(self._rng.randrange(50_000))
            if len(request.output_token_ids) == request.max_tokens:
                self._scheduler.finish(request)
                del self._times[row.request_id]
                self._note(klass, times)

    def _note(self, klass: Klass, times: Sequence[float]) -> None:
        if klass == "interactive":
            gaps = [after - before for before, after in pairwise(times)]
            self._seen.ttft.append(gaps[0])
            self._seen.gaps += gaps[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=0.5, help="interactive requests, as a part of the capacity")
    parser.add_argument("--seconds", type=float, default=600.0, help="of made-up time in each run")
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=12.5)
    parser.add_argument("--row-ms", type=float, default=0.9)
    parser.add_argument("--prompt-token-ms", type=float, default=0.33)
    args = parser.parse_args()
    alone = Machine(args, 1).run(0.0, True)
    per_s = args.load * alone.tokens / alone.seconds / (args.prompt + args.output)
    calm, busy = Machine(args, 2).run(per_s, False), Machine(args, 2).run(per_s, True)
    for name, before, after in (("TTFT", calm.ttft, busy.ttft), ("ITL", calm.gaps, busy.gaps)):
        old, new = (percentile(values, 0.95) for values in (before, after))
        print(f"{name} p95 without and beside batch work: {1e3 * old:.1f}, {1e3 * new:.1f} ms: {new / old:.2f} times; "
              f"p50 {1e3 * percentile(before, 0.5):.1f}, {1e3 * percentile(after, 0.5):.1f} ms")  # fmt: skip
    part = busy.tokens / busy.seconds / (alone.tokens / alone.seconds)
    print(f"tokens/s: {part:.2f} of batch alone, with {per_s:.1f} interactive requests/s")
    # A second of steps of mean length s holds 1/s fixed costs; what is left of it is the work of rows and prompts.
    mean_alone, mean_busy = (1e3 * one.seconds / one.steps for one in (alone, busy))
    needed = args.step_ms / (1 - 0.95 * (1 - args.step_ms / mean_alone))
    print(f"mean step: batch alone {mean_alone:.1f}, together {mean_busy:.1f} ms; 0.95 would take {needed:.1f} ms")


if __name__ == "__main__":
    main()
