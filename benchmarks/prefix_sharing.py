"""What the prefix cache is worth: requests that share a long prefix, arriving together, with and without it.

Prints time to first token p50 of both, in turns, their ratio (target: at most a quarter), and how much prefill was
computed beyond the ideal, which is the prefix once and every tail (target: within 5 %).

    python -m benchmarks.prefix_sharing [--requests 32 --prefix 1024 --tail 16 --output 8 --rounds 2] [--model NAME]
"""

from __future__ import annotations

import argparse
import random
import statistics

from benchmarks._engine_run import make_request, run
from benchmarks._percentile import percentile
from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.models.loading.loader import load


def main() -> int:
    """Exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--tail", type=int, default=16)
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    loaded = load(args.model, dtype=args.dtype, device="cpu")
    engines = {
        cache: Engine(loaded, EngineConfig(max_num_seqs=args.requests, enable_prefix_caching=cache))
        for cache in (True, False)
    }
    rng = random.Random(0)
    vocabulary = loaded.config.vocab_size
    first: dict[bool, list[float]] = {True: [], False: []}
    extra = 0.0
    for round_ in range(args.rounds):
        prefix = [rng.randrange(vocabulary) for _ in range(args.prefix)]
        for cache, engine in engines.items():
            before = engine.stats().counters["computed_tokens"]
            tails = [[rng.randrange(vocabulary) for _ in range(args.tail)] for _ in range(args.requests)]
            requests = [make_request(f"{round_}-{i}/0", prefix + tail, args.output) for i, tail in enumerate(tails)]
            times = run(engine, [(0.0, request) for request in requests])
            first[cache].append(percentile([each[0] for each in times.values()], 0.5))
            computed = engine.stats().counters["computed_tokens"] - before - args.requests * (args.output - 1)
            if cache:
                extra = max(extra, computed / (args.prefix + args.requests * args.tail) - 1)
    on, off = (statistics.median(first[cache]) for cache in (True, False))
    print(
        f"{args.requests} requests, prefix {args.prefix}, tails {args.tail}: time to first token p50 {on:.2f} s with "
        f"the cache, {off:.2f} s without, ratio {on / off:.2f}; prefill {100 * extra:+.1f} % of the ideal"
    )
    return int(on / off > 0.25 or extra > 0.05)


if __name__ == "__main__":
    raise SystemExit(main())
