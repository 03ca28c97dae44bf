"""What engine threads take from other programs: wall and CPU time of decode steps on several threads, with pauses.

OpenMP reads its settings when the process starts, so compare runs of the command:

    OMP_WAIT_POLICY=passive python -m benchmarks.idle_threads [--threads 2 --rows 8 --steps 60 --pause-ms 3]
    OMP_WAIT_POLICY=active python -m benchmarks.idle_threads
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from engine_worker.models.loading.loader import load
from tests.support.paged import Row, make_layout

BLOCK, LENGTH = 16, 100


@torch.inference_mode()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause-ms", type=float, default=3.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model, dtype="bfloat16", device="cpu", quantization="none")
    blocks = -(-LENGTH // BLOCK)
    cache = loaded.model.new_kv_cache(args.rows * blocks, BLOCK)
    layout = make_layout(
        [Row(LENGTH - 1, 1, range(row * blocks, (row + 1) * blocks)) for row in range(args.rows)], BLOCK
    )
    token_ids = torch.arange(args.rows)
    walls = []
    for step in range(args.steps + 5):
        if step == 5:
            cpu = time.process_time()
        start = time.perf_counter()
        loaded.model.forward(token_ids, layout, cache)
        walls.append(time.perf_counter() - start)
        time.sleep(args.pause_ms / 1e3)
    own = (time.process_time() - cpu) / args.steps * 1e3
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    print(f"OMP_WAIT_POLICY {policy}: median {statistics.median(walls[5:]) * 1e3:.1f} ms, CPU time a step {own:.1f} ms")


if __name__ == "__main__":
    main()
