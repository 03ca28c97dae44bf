"""What running out of blocks costs: a pool that holds a fraction of what the running requests need.

Prints how many tokens were computed per token that had to be (target: at most 1.6 with a third), preemptions, and the
time against a pool that holds everything. Tokens must be the same in both.

    python -m benchmarks.preemption [--requests 48 --share 0.33 --prompt 200 --output 200] [--no-cache] [--model NAME]
"""

from __future__ import annotations

import argparse
import random
import time

from benchmarks._engine_run import make_request, run
from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.models.loading.loader import load


def main() -> int:
    """Exit code 1 when the target is missed or a token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--share", type=float, default=1 / 3)
    parser.add_argument("--prompt", type=int, default=200, help="longest prompt")
    parser.add_argument("--output", type=int, default=200, help="longest output")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    loaded = load(args.model, dtype=args.dtype, device="cpu")
    rng = random.Random(0)
    prompts = [
        [rng.randrange(loaded.config.vocab_size) for _ in range(rng.randint(args.prompt // 10, args.prompt))]
        for _ in range(args.requests)
    ]
    limits = [rng.randint(args.output // 10, args.output) for _ in prompts]
    needed = sum(-(-(len(prompt) + limit) // 16) for prompt, limit in zip(prompts, limits, strict=True))
    least = sum(len(prompt) + limit - 1 for prompt, limit in zip(prompts, limits, strict=True))
    outputs, seconds, code = [], [], 0
    for share in (1.0, args.share):
        config = EngineConfig(
            num_blocks=int(needed * share), max_num_seqs=args.requests, enable_prefix_caching=not args.no_cache
        )
        engine = Engine(loaded, config)
        requests = [make_request(f"{i}/0", *both) for i, both in enumerate(zip(prompts, limits, strict=True))]
        start = time.perf_counter()
        run(engine, [(0.0, request) for request in requests])
        seconds.append(time.perf_counter() - start)
        outputs.append([request.output_token_ids for request in requests])
        counters = engine.stats().counters
        ratio = counters["computed_tokens"] / least
        code |= ratio > 1.6
        print(
            f"pool {int(needed * share):5d} blocks ({share:4.0%}): {ratio:.2f} tokens computed per token needed, "
            f"{counters['preemptions']} preemptions, {seconds[-1]:.1f} s",
            flush=True,
        )
    same = outputs[0] == outputs[1]
    print(f"tokens {'equal' if same else 'DIFFER'}, time {seconds[1] / seconds[0]:.2f} times that of the whole pool")
    return int(code or not same)


if __name__ == "__main__":
    raise SystemExit(main())
