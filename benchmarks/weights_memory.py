"""Resident memory of a worker's engine per weight format: python -m benchmarks.weights_memory [--model M]

Each format in a process of its own: model loaded, engine made and one request run. Prints weights, KV cache, resident
size, and what is left when both are taken away (target: at most 400 MiB).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.models.loading.loader import load
from tests.support.requests import make_request

FORMATS = (("none", "float32"), ("none", "bfloat16"), ("gguf", "bfloat16"), ("int8", "bfloat16"), ("q8_0", "bfloat16"))
_CHILD = "--child"


def measure(model: str, quantization: str, dtype: str) -> dict[str, float | str]:
    """In this process: what a worker would hold after its first request. Sizes in MiB."""
    start = time.perf_counter()
    loaded = load(model, dtype=dtype, quantization=quantization, device="cpu")
    seconds = time.perf_counter() - start
    engine = Engine(loaded, EngineConfig(num_blocks=64))
    engine.add(make_request([1] * 100, max_tokens=8))
    while engine.has_work:
        engine.step()
    cache = 64 * 16 * loaded.config.kv_bytes_per_token()
    resident = int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    return {
        "kept as": loaded.quantization,
        "weights": loaded.weight_bytes / 2**20,
        "cache": cache / 2**20,
        "resident": resident / 2**20,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument(_CHILD, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.model, *arguments.child)))
        return
    for quantization, dtype in FORMATS:
        command = [sys.executable, "-m", "benchmarks.weights_memory", "--model", arguments.model]
        done = subprocess.run([*command, _CHILD, quantization, dtype], stdout=subprocess.PIPE, check=True, text=True)
        got = json.loads(done.stdout.splitlines()[-1])
        rest = got["resident"] - got["weights"] - got["cache"]
        print(
            f"--quantization {quantization} --dtype {dtype}: kept as {got['kept as']}, "
            f"weights {got['weights']:.0f} MiB, cache {got['cache']:.0f}, resident {got['resident']:.0f}, "
            f"rest {rest:.0f}; loaded in {got['seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
