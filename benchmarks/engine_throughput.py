"""Engine against transformers' generate on the same weights, same dtype, same machine, same run.

Prints output tokens per second of (a) transformers, one request after the other, and (b) the engine with all requests
at once, alternating, and the ratio of the medians. Needs only the worker extra.

    python -m benchmarks.engine_throughput [--requests 16 --prompt 128 --output 64 --dtype float32 --rounds 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch

from benchmarks._engine_run import make_request, timed_step
from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.models.loading.loader import load
from tests.support.llama_oracle import default_gguf, hf_from_gguf


def engine_round(engine: Engine, prompts: list[list[int]], output: int, run: int) -> float:
    """Output tokens per second of one batch, greedy, arriving together."""
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add(make_request(f"{run}-{index}/0", prompt, output))
    tokens = 0
    while engine.has_work:
        tokens += sum(event.token_id is not None for event in timed_step(engine))
    assert tokens == len(prompts) * output
    return tokens / (time.perf_counter() - start)


def transformers_round(model: Any, prompts: list[list[int]], output: int) -> float:
    """Output tokens per second, one request after the other."""
    start = time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=output,
            min_new_tokens=output,
            pad_token_id=0,
        )
        assert out.shape[1] == len(prompt) + output
    return len(prompts) * output / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of each request")
    parser.add_argument("--output", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    rng = random.Random(0)
    loaded = load("", dtype=args.dtype, device="cpu", max_model_len=None)
    # No prefix cache: the rounds repeat lengths, not prompts, but nothing may be had for free.
    engine = Engine(loaded, EngineConfig(max_num_seqs=args.requests, enable_prefix_caching=False))
    peer = hf_from_gguf(default_gguf()).to(getattr(torch, args.dtype))

    def prompts() -> list[list[int]]:
        return [[rng.randrange(17, 49152) for _ in range(args.prompt)] for _ in range(args.requests)]

    engine_round(engine, prompts(), 4, -1)
    transformers_round(peer, prompts()[:1], 4)
    ours, theirs = [], []
    for run in range(args.rounds):
        theirs.append(transformers_round(peer, prompts(), args.output))
        ours.append(engine_round(engine, prompts(), args.output, run))
        print(f"round {run + 1}: transformers {theirs[-1]:7.1f} tokens/s, engine {ours[-1]:7.1f} tokens/s", flush=True)
    a, b = statistics.median(ours), statistics.median(theirs)
    print(
        f"{args.dtype}, {args.requests} requests, prompt {args.prompt}, output {args.output}, "
        f"{torch.get_num_threads()} threads: engine {a:.1f}, transformers {b:.1f} output tokens/s, ratio {a / b:.2f}"
    )


if __name__ == "__main__":
    main()
