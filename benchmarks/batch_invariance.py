"""What `--batch-invariant` costs: CPU time of whole steps of the real model, with and without it, alternating.

Runs on one thread, so that CPU time leaves out what other processes took. Figures are medians over rounds.

    python -m benchmarks.batch_invariance [--dtype bfloat16] [--format none,int8,…] [--kv-cache-dtype auto] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks._batches import BATCHES, BLOCK_SIZE, rows_in_order
from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from kernels.ops import BatchLayout, KVCache


def _step(loaded: LoadedModel, layout: BatchLayout, cache: KVCache) -> Callable[[], None]:
    """One step over the batch, logits of each row's last token."""
    token_ids = torch.arange(layout.num_tokens) % 1000
    last = layout.query_start[1:].long() - 1

    def run() -> None:
        loaded.model.forward(token_ids, layout, cache, last)

    return run


def _median_ms(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """CPU milliseconds of each, alternating."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, own in zip(runs, times, strict=True):
            start = time.thread_time()
            run()
            own.append((time.thread_time() - start) * 1e3)
    return [statistics.median(own) for own in times]


def _compare(args: argparse.Namespace, weight_format: str) -> None:
    """Prints a line a batch."""
    plain, invariant = (
        load(
            args.model,
            dtype=args.dtype,
            device="cpu",
            quantization=weight_format,
            kv_cache_dtype=args.kv_cache_dtype,
            batch_invariant=flag,
        )
        for flag in (False, True)
    )
    print(f"{plain.name}, {plain.kernels}, weights {plain.quantization}, {args}")
    blocks = max(rows_in_order(rows)[1] for rows in BATCHES.values())
    cache = plain.model.new_kv_cache(blocks, BLOCK_SIZE)
    for pages in (*cache.layers, *cache.scales):
        for page in pages:
            page.copy_(torch.randn(page.shape) * (20 if page.dtype is torch.int8 else 1))
    for name, rows in BATCHES.items():
        layout, _ = rows_in_order(rows)
        off, on = _median_ms([_step(loaded, layout, cache) for loaded in (plain, invariant)], args.rounds)
        print(f"{name:26s} off {off:8.2f} ms   on {on:8.2f} ms   ratio {on / off:.3f}", flush=True)


@torch.inference_mode()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--format", default="none", help="how weights are kept, as --quantization; several by commas")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for weight_format in args.format.split(","):
        _compare(args, weight_format)


if __name__ == "__main__":
    main()
