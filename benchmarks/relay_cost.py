"""What queue, relay and SSE add: the whole server against its own engine driven in this process, in turns.

    python -m benchmarks.relay_cost [--dtype bfloat16] [--quantization int8] [--rounds 3] [--concurrency 8 32]

Time to first token is of single requests (prompt 128), throughput of a closed loop (prompt 256, output 128). Wanted: at
most 2 ms more to the first token, at most 5 % less throughput. The server is stopped (SIGSTOP) while the engine runs.
The client takes 10 to 20 us a token of the same cores; with --parsing it is the one of `serving`, which takes 45 to 65.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks._engine_run import make_request, timed_step
from benchmarks._serving.client import Client, Prompts
from benchmarks._serving.light import LightClient
from benchmarks._serving.scenarios import closed, single
from benchmarks._serving.servers import Server
from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.models.loading.loader import load

MODEL = "SmolLM2-135M-Instruct"
CACHE = 2 << 30


class InProcess:
    """The same loads on an engine, without anything around it."""

    def __init__(self, dtype: str, quantization: str) -> None:
        loaded = load("", dtype=dtype, device="cpu", max_model_len=None, quantization=quantization)
        self._engine = Engine(loaded, EngineConfig(kv_cache_memory=CACHE))
        self._count = 0

    def _add(self, prompt: list[int], tokens: int) -> None:
        self._count += 1
        self._engine.add(make_request(f"{self._count}/0", prompt, tokens))

    def first_token_s(self, prompts: Prompts) -> float:
        """Median of eight requests, one at a time: prompt 128, output 128."""
        times = []
        for _ in range(8):
            start = time.perf_counter()
            self._add(prompts.make(128), 128)
            first = 0.0
            while self._engine.has_work:
                if any(event.token_id is not None for event in timed_step(self._engine)) and not first:
                    first = time.perf_counter() - start
            times.append(first)
        return statistics.median(times)

    def tokens_per_s(self, concurrency: int, prompts: Prompts) -> float:
        """A closed loop of three rounds: prompt 256, output 128."""
        left, tokens = 3 * concurrency, 0
        start = time.perf_counter()
        for _ in range(concurrency):
            left -= 1
            self._add(prompts.make(256), 128)
        while self._engine.has_work:
            for event in timed_step(self._engine):
                tokens += event.token_id is not None
                if event.finish_reason is not None and left > 0:
                    left -= 1
                    self._add(prompts.make(256), 128)
        return tokens / (time.perf_counter() - start)


async def served(client_type: type[Client], server: Server, concurrency: int, seed: str) -> float:
    """The figure of one load on the server: seconds to the first token for 0, else tokens per second."""
    async with client_type(server.url, MODEL) as client:
        await client.stream(Prompts(f"warm/{seed}").make(64), 8)
        if concurrency == 0:
            return (await single(client, Prompts(seed)))["ttft p50 s"]
        return (await closed(concurrency, client, Prompts(seed)))["output tokens/s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--parsing", action="store_true", help="a client that parses every event when it comes")
    args = parser.parse_args()
    run = asyncio.run if args.parsing else uvloop.run
    client_type = Client if args.parsing else LightClient
    engine = InProcess(args.dtype, args.quantization)
    command = f"{sys.executable} -m headrace serve --port {{port}} --dtype {args.dtype} --kv-cache-memory {CACHE}"
    command += f" --quantization {args.quantization}"
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as logs:
        server = Server("headrace", command, MODEL, Path(logs) / "serve.log")
        server.start()
        try:
            for concurrency in (0, *args.concurrency):
                bare, whole = [], []
                for round_ in range(args.rounds):
                    seed = f"{concurrency}/{round_}"
                    server.pause()
                    prompts = Prompts(seed)
                    one = engine.tokens_per_s(concurrency, prompts) if concurrency else engine.first_token_s(prompts)
                    bare.append(one)
                    server.resume()
                    whole.append(run(served(client_type, server, concurrency, seed)))
                a, b = statistics.median(bare), statistics.median(whole)
                if concurrency:
                    print(f"{concurrency} at once: engine {a:.1f}, server {b:.1f} tokens/s, {1 - b / a:.1%} less")
                else:
                    print(f"first token: engine {1e3 * a:.2f}, server {1e3 * b:.2f} ms: {1e3 * (b - a):.2f} ms more")
                sys.stdout.flush()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
