"""The scheduler's own cost: what a step of many running requests takes to plan and to take in, without any model.

Requests decode steadily; `--arriving` of them end in each step and as many new ones with prompts take their place.
Every figure is microseconds a step, the median over rounds: `plan` is `schedule`, `apply` is `advance` of every row and
what the engine does to find its request, `total` both. `us/request` shows whether growth is linear.

    python -m benchmarks.scheduler [--running 64,128,256,512] [--rounds 400] [--arriving 1]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from engine_worker.cache.manager import CacheManager
from engine_worker.config import EngineConfig
from engine_worker.plan import BatchPlan
from engine_worker.request import Request
from engine_worker.scheduling.scheduler import Scheduler
from shared.params import SamplingParams

BLOCK_SIZE = 16
LIMIT_US = 500.0
"""At 256 running requests."""


class Load:
    """A scheduler with a constant number of running requests."""

    def __init__(self, running: int, arriving: int, batch: bool) -> None:
        self._rng = random.Random(0)
        self._arriving = arriving
        self._numbers = 0
        self._batch = batch
        config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=running, max_num_batched_tokens=4 * running)
        self.scheduler = Scheduler(config, CacheManager(running * 64, BLOCK_SIZE), 4096)
        for _ in range(running):
            self._arrive()
        for _ in range(100):
            self.round()

    def live(self) -> tuple[Request, ...]:
        return self.scheduler.running

    def _arrive(self) -> None:
        self._numbers += 1
        prompt = [self._rng.randrange(50_000) for _ in range(self._rng.randint(50, 200))]
        self.scheduler.add(
            Request(
                f"{self._numbers}/0",
                prompt,
                SamplingParams(),
                self._numbers,
                max_tokens=800,
                stop_token_ids=frozenset(),
                klass="batch" if self._batch and self._numbers % 2 else "interactive",
                arrival=self._numbers,
            )
        )

    def round(self) -> tuple[float, float, int]:
        """One step: seconds to plan, seconds to take in, rows."""
        before = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None
        self._apply(plan)
        applied = time.perf_counter()
        self.scheduler.took(2e-3 + 1e-5 * plan.num_tokens)
        for row in plan.rows:
            if row.samples:
                row.output_token_ids.append(self._rng.randrange(50_000))
        self._replace(plan)
        return planned - before, applied - planned, len(plan.rows)

    def _apply(self, plan: BatchPlan) -> None:
        scheduler = self.scheduler
        for row in plan.rows:
            request = scheduler.get(row.request_id)
            assert request is not None
            scheduler.advance(request, row.num_new_tokens)

    def _replace(self, plan: BatchPlan) -> None:
        full = [r for r in self.live() if len(r.output_token_ids) >= r.max_tokens - 1]
        drawn = self._rng.sample(self.live(), min(self._arriving, len(plan.rows)))
        for request in dict.fromkeys([*full, *drawn]):
            self.scheduler.finish(request)
            self._arrive()


def main() -> int:
    """Exit code 1 when 256 running requests cost more than half a millisecond."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="64,128,256,512")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--arriving", type=int, default=1, help="requests that end and arrive in each step")
    parser.add_argument("--batch", action="store_true", help="every second request is of class batch")
    args = parser.parse_args()
    code = 0
    for running in map(int, args.running.split(",")):
        load = Load(running, args.arriving, args.batch)
        rounds = [load.round() for _ in range(args.rounds)]
        plan, apply = (statistics.median(r[i] for r in rounds) * 1e6 for i in (0, 1))
        total = statistics.median(r[0] + r[1] for r in rounds) * 1e6
        rows = statistics.median(r[2] for r in rounds)
        print(
            f"{running:4d} running, {rows:5.0f} rows: plan {plan:6.0f}  apply {apply:6.0f}  total {total:6.0f} us "
            f"a step, {total / running:.2f} us/request",
            flush=True,
        )
        if running == 256 and total > LIMIT_US:
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
