"""How near a long prompt's prefill comes to the machine's matrix peak, and where its time goes.

The peak is the best bfloat16 matrix product torch (oneDNN) reaches here, measured in turns with the prefill. Counted
are the multiplications of linears and of causal attention. One thread and its CPU time, so that other processes hardly
show.

    python -m benchmarks.prefill [--tokens 4000] [--chunk 512] [--dtype bfloat16] [--kv-cache-dtype auto] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from engine_worker.models.base import LoadedModel
from engine_worker.models.config import ModelConfig
from engine_worker.models.loading.loader import load
from kernels.ops import RopeTable, select_backend
from tests.support.paged import Row, make_layout

BLOCK = 16
PEAK_SIZES = ((512, 2048, 2048), (1024, 1024, 1024), (2048, 2048, 2048))


def _cpu_s(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def _peak(rounds: int = 5) -> float:
    """Best FLOP/s of a bfloat16 matrix product."""
    best = 0.0
    for rows, inner, columns in PEAK_SIZES:
        a, b = torch.randn(rows, inner).bfloat16(), torch.randn(inner, columns).bfloat16()
        fastest = min(_cpu_s(lambda a=a, b=b: a @ b) for _ in range(rounds))
        best = max(best, 2 * rows * inner * columns / fastest)
    return best


def _chunks(tokens: int, chunk: int) -> list[tuple[int, int]]:
    return [(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk)]


def _linear_flop(config: ModelConfig, tokens: int) -> float:
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return 2.0 * tokens * (config.num_parameters() - embeddings)


def _attention_flop(config: ModelConfig, tokens: int) -> float:
    return 4.0 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1) / 2


def _prefill(loaded: LoadedModel, tokens: int, chunk: int) -> Callable[[], None]:
    cache = loaded.model.new_kv_cache(-(-tokens // BLOCK), BLOCK)
    blocks = range(cache.num_blocks)
    token_ids = torch.arange(tokens) % 1000
    layouts = [(start, make_layout([Row(start, count, blocks)], BLOCK)) for start, count in _chunks(tokens, chunk)]

    nothing = torch.empty(0, dtype=torch.int64)

    def run() -> None:
        for start, layout in layouts:
            loaded.model.forward(token_ids[start : start + layout.num_tokens], layout, cache, nothing)

    return run


def _attention(loaded: LoadedModel, tokens: int, chunk: int) -> Callable[[], None]:
    """Only the attention of the same prefill, over the same shapes."""
    config, ops = loaded.config, select_backend("cpu")
    cache = loaded.model.new_kv_cache(-(-tokens // BLOCK), BLOCK)
    blocks = range(cache.num_blocks)
    angles = torch.zeros(tokens, config.head_dim // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layouts = [make_layout([Row(start, count, blocks)], BLOCK) for start, count in _chunks(tokens, chunk)]
    qkv = torch.randn(chunk, width, dtype=torch.float32).to(config.torch_dtype)
    queries = torch.randn(chunk, config.num_heads, config.head_dim).to(config.torch_dtype)
    for layout in layouts:
        step = ops.begin(layout, cache, rope)
        for layer in range(config.num_layers):
            step.rope_and_cache(qkv[: layout.num_tokens].clone(), layer, config.num_heads)

    def run() -> None:
        for layout in layouts:
            step = ops.begin(layout, cache, rope)
            for layer in range(config.num_layers):
                step.attention(queries[: layout.num_tokens], layer)

    return run


@torch.inference_mode()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(
        args.model,
        dtype=args.dtype,
        device="cpu",
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    whole, attention = (make(loaded, args.tokens, args.chunk) for make in (_prefill, _attention))
    peaks, totals, attentions = [], [], []
    for _ in range(args.rounds):
        peaks.append(_peak())
        totals.append(_cpu_s(whole))
        attentions.append(_cpu_s(attention))
    peak, total, own = max(peaks), statistics.median(totals), statistics.median(attentions)
    linear_flop, attention_flop = (of(loaded.config, args.tokens) for of in (_linear_flop, _attention_flop))
    print(f"{loaded.name}, {loaded.kernels}, {args}")
    print(f"peak of a bfloat16 product   {peak / 1e9:8.0f} GFLOP/s")
    rest = total - own
    for name, seconds, flop in (
        ("prefill", total, linear_flop + attention_flop),
        ("attention", own, attention_flop),
        ("all but attention", rest, linear_flop),
    ):
        rate = flop / seconds
        print(f"{name:20s} {seconds:7.2f} s  {rate / 1e9:8.0f} GFLOP/s  {rate / peak:5.0%} of the peak")
    print(f"{args.tokens / total:.0f} prompt tokens/s on one thread; attention takes {own / total:.0%}")


if __name__ == "__main__":
    main()
