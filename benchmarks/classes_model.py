"""What batch work may cost interactive requests, and how much of it that leaves: the bound for `benchmarks.fairness`.

The real scheduler under Poisson arrivals, on a machine of made-up time: minutes of load in a second, without the noise
of a machine. A step takes a fixed time, so much per generating row and per prompt token, and varies by 6 %; give what
`benchmarks.fairness --only steps` measures, the defaults are SmolLM2-135M in bfloat16 on one thread. Prints the figures
of `--only classes` for the scheduler as it is, then the most throughput that any one limit for batch rows, chosen with
hindsight, allows while TTFT and inter-token p95 stay within 1.1 times.

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
from engine_worker.scheduling.cost import StepShape
from engine_worker.scheduling.pace import Pace
from engine_worker.scheduling.scheduler import Scheduler

_NOISE, _HICCUPS, _HICCUP = 0.06, 0.01, 1.6
"""Spread of a step's time, and one step in a hundred that takes 1.6 times as long."""
_ALLOWED = 1.1
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

    def __init__(self, args: argparse.Namespace, seed: int, pace: Pace | None = None) -> None:
        self._args = args
        self._rng = random.Random(seed)
        config = EngineConfig(max_num_seqs=args.seats)
        self._scheduler = Scheduler(config, CacheManager(100_000, 16, enable_prefix_caching=True), 8192, pace)
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


class Limit(Pace):
    """Batch rows fill steps up to a fixed time. They may have to keep out of steps with an interactive prompt, in which
    the slowest gaps are."""

    def __init__(self, seconds: float, *, beside_prompts: bool) -> None:
        super().__init__()
        self._seconds, self._beside_prompts = seconds, beside_prompts

    def batch_limit(self, interactive: StepShape) -> float:
        return 0.0 if interactive.pairs and not self._beside_prompts else self._seconds


def ratios(calm: Load, busy: Load) -> tuple[float, float]:
    """TTFT and inter-token p95 with batch work, times those without."""
    return (
        percentile(busy.ttft, 0.95) / percentile(calm.ttft, 0.95),
        percentile(busy.gaps, 0.95) / percentile(calm.gaps, 0.95),
    )


def best_limit(args: argparse.Namespace, per_s: float, calm: Load) -> tuple[float, str]:
    """Tokens a second of the best fixed limit that keeps both within 1.1 times, and which it is; interactive work alone
    is always allowed."""
    best = (calm.tokens / calm.seconds, "none")
    itl = percentile(calm.gaps, 0.95)
    for beside in (False, True):
        for part in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.6, 2.0):
            busy = Machine(args, 2, Limit(part * itl, beside_prompts=beside)).run(per_s, True)
            if max(ratios(calm, busy)) <= _ALLOWED:
                where = "beside prompts, too" if beside else "not beside prompts"
                best = max(best, (busy.tokens / busy.seconds, f"{part:.1f} times the ITL p95 without batch, {where}"))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=0.5, help="interactive requests, as a part of the capacity")
    parser.add_argument("--seconds", type=float, default=300.0, help="of made-up time in each run")
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=12.5)
    parser.add_argument("--row-ms", type=float, default=0.9)
    parser.add_argument("--prompt-token-ms", type=float, default=0.33)
    args = parser.parse_args()
    alone = Machine(args, 1).run(0.0, True)
    full = alone.tokens / alone.seconds
    per_s = args.load * full / (args.prompt + args.output)
    calm, busy = Machine(args, 2).run(per_s, False), Machine(args, 2).run(per_s, True)
    ttft, itl = ratios(calm, busy)
    print(f"{per_s:.1f} interactive requests/s; p95 without batch: TTFT {1e3 * percentile(calm.ttft, 0.95):.1f}, "
          f"ITL {1e3 * percentile(calm.gaps, 0.95):.1f} ms")  # fmt: skip
    part = busy.tokens / busy.seconds / full
    print(f"as it is: TTFT {ttft:.2f}, ITL {itl:.2f} times; tokens/s {part:.2f} of batch alone")
    most, which = best_limit(args, per_s, calm)
    print(f"best fixed limit within {_ALLOWED} times: tokens/s {most / full:.2f} of batch alone ({which})")
    print(f"interactive work alone: {calm.tokens / calm.seconds / full:.2f}")


if __name__ == "__main__":
    main()
