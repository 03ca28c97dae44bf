"""What drawing tokens costs a step: decode steps of one batch, greedy and with temperature and filters, in turns.

Prints the median time of a step for each, and how much longer it is than a greedy one. Needs only the worker extra.

    python -m benchmarks.sampling_cost [--rows 32 --dtype bfloat16 --rounds 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks._engine_run import make_request
from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.models.loading.loader import load
from shared.params import SamplingParams

PROMPT, OUTPUT = 64, 48
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "and top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "and top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "and both": SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
}


def step_times(engine: Engine, rows: int, params: SamplingParams, name: str, rng: random.Random) -> list[float]:
    """Milliseconds of each step in which all rows decode."""
    for row in range(rows):
        prompt = [rng.randrange(17, 49152) for _ in range(PROMPT)]
        engine.add(make_request(f"{name}-{row}/0", prompt, OUTPUT, params=params))
    times = []
    while engine.has_work:
        began = time.perf_counter()
        events = engine.step()
        took = time.perf_counter() - began
        engine.took(took)
        if len(events) == rows:
            times.append(took * 1000)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    engine = Engine(
        load("", dtype=args.dtype, device="cpu"),
        EngineConfig(max_num_seqs=args.rows, enable_prefix_caching=False),
    )
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    step_times(engine, args.rows, KINDS["greedy"], "warm", rng)
    for round_ in range(args.rounds):
        for name, params in KINDS.items():
            times[name] += step_times(engine, args.rows, params, f"{round_} {name}", rng)
    greedy = statistics.median(times["greedy"])
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{args.rows} rows, {name:16} {middle:6.2f} ms a step, {100 * (middle / greedy - 1):+5.1f} % of greedy")


if __name__ == "__main__":
    main()
