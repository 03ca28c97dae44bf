"""Micro-benchmark of the native CPU kernels against torch, interleaved in one process.

SmolLM2-135M's shapes with random weights, all layers different, so weights come from memory as in serving. Every
figure is the minimum of many rounds in milliseconds; on a machine with other work, trust the ratios, or run with
--threads 1, which counts CPU time and so leaves out what other processes took.

`weights` compares whole steps in each weight format with reading those weights once, at the memory bandwidth measured
in the same rounds: the floor of a decode step.

    python -m benchmarks.cpu_kernels [--threads 2] [--rounds 30] [--only linear|attention|step|weights]
                                     [--levels amx,avx512] [--formats bfloat16,int8,q8_0,q4_1]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._batches import BATCHES, BLOCK_SIZE, rows_in_order
from kernels.cpu.isa import available_levels
from kernels.cpu.library import Library
from kernels.cpu.native import NativeOps
from kernels.cpu.onednn import OneDnnOps
from kernels.interface import Ops
from kernels.layout import AttentionWeights, MlpWeights, ModelWeights, RopeTable, new_kv_cache

HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS, VOCAB = 576, 9, 3, 64, 1536, 30, 49152
UNITS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "output": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
PREFILL = 512
STREAMED_BYTES = 256 << 20
"""Read to measure memory bandwidth: far more than a processor caches for two cores."""
Runs = dict[str, Callable[[], object]]


def fastest(runs: Runs, rounds: int) -> dict[str, float]:
    """Milliseconds of each, alternating, minimum over rounds."""
    best = dict.fromkeys(runs, float("inf"))
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(rounds):
        for name, run in runs.items():
            start = clock()
            run()
            best[name] = min(best[name], (clock() - start) * 1e3)
    return best


def report(title: str, times: dict[str, float], baseline: str) -> None:
    """One line: every time, and how many times faster than the baseline."""
    cells = [f"{name} {ms:8.3f} ({times[baseline] / ms:5.2f}x)" for name, ms in times.items()]
    print(f"{title:28s} " + "  ".join(cells), flush=True)


def _weight(out: int, size: int) -> Tensor:
    return (torch.randn(out, size) * size**-0.5).bfloat16()


def linears(backends: dict[str, NativeOps], formats: Sequence[str], rounds: int, batches: Sequence[int]) -> None:
    """Each linear of all layers, and the logits."""
    torch_ops = OneDnnOps()
    units = {**{name: (shape, LAYERS) for name, shape in UNITS.items()}, "logits": ((VOCAB, HIDDEN), 1)}
    for name, ((out, size), count) in units.items():
        weights = [_weight(out, size) for _ in range(count)]
        packed_torch = [torch_ops.pack_linear(weight) for weight in weights]
        packed = {
            f"{key}-{form}": (ops, [ops.pack_linear(weight, weight_format=form) for weight in weights])
            for key, ops in backends.items()
            for form in formats
        }
        for batch in batches:
            x = torch.randn(batch, size).bfloat16()
            runs: Runs = {
                "torch": lambda x=x, w=weights: [F.linear(x, weight) for weight in w],
                "onednn": lambda x=x, w=packed_torch: [torch_ops.linear(x, layer) for layer in w],
            }
            for key, (ops, layers) in packed.items():
                runs[key] = lambda x=x, ops=ops, layers=layers: [ops.linear(x, layer) for layer in layers]
            report(f"{name} x{count}, batch {batch}", fastest(runs, rounds), "torch")


def _rope() -> RopeTable:
    angles = torch.outer(torch.arange(8192.0), 1e4 ** (-torch.arange(0, DIM, 2) / DIM))
    return RopeTable(angles.cos(), angles.sin())


def attention(backends: dict[str, NativeOps], rounds: int) -> None:
    """Attention alone, one layer."""
    everyone: dict[str, Ops] = {"torch": OneDnnOps(), **backends}
    rope = _rope()
    for name, rows in BATCHES.items():
        layout, blocks = rows_in_order(rows)
        cache = new_kv_cache(1, blocks, BLOCK_SIZE, KV_HEADS, DIM, torch.bfloat16, "cpu")
        for page in cache.layers[0]:
            page.copy_(torch.randn(page.shape))
        query = torch.randn(layout.num_tokens, HEADS, DIM).bfloat16()
        steps = {key: ops.begin(layout, cache, rope) for key, ops in everyone.items()}
        runs: Runs = {key: lambda step=step, query=query: step.attention(query, 0) for key, step in steps.items()}
        report(f"attention, {name}", fastest(runs, rounds), "torch")


class _Model:
    """All layers and the logits on one backend."""

    def __init__(self, ops: Ops, form: str = "") -> None:
        extra = {"weight_format": form} if form else {}
        norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
        self._ops = ops
        self._rope = _rope()
        self._layers = []
        for _ in range(LAYERS):
            packed = {name: ops.pack_linear(_weight(*shape), **extra) for name, shape in UNITS.items()}
            self._layers.append(
                (
                    AttentionWeights(norm, packed["qkv"], packed["output"], HEADS, KV_HEADS, DIM, 1e-5),
                    MlpWeights(norm, packed["gate_up"], packed["down"], 1e-5),
                )
            )
        head = ops.pack_linear(_weight(VOCAB, HIDDEN), **extra)
        self._weights = ModelWeights(head, self._layers, norm, 1e-5, head, torch.bfloat16)

    @property
    def num_bytes(self) -> int:
        """Of all weights that a step reads."""
        packed = [linear for a, m in self._layers for linear in (a.qkv, a.output, m.gate_up, m.down)]
        return sum(linear.weight.nbytes for linear in (*packed, self._weights.head))

    def step(self, rows: Sequence[tuple[int, int]]) -> Callable[[], object]:
        """A function that runs one step over these rows, logits for each row's last token."""
        layout, blocks = rows_in_order(rows)
        cache = new_kv_cache(LAYERS, blocks, BLOCK_SIZE, KV_HEADS, DIM, torch.bfloat16, "cpu")
        for layer in cache.layers:
            for page in layer:
                page.copy_(torch.randn(page.shape))
        token_ids = torch.randint(VOCAB, (layout.num_tokens,))
        last = layout.query_start[1:].long() - 1

        def run() -> object:
            step = self._ops.begin(layout, cache, self._rope)
            return self._ops.forward(self._weights, token_ids, last, step)

        return run


def steps(backends: dict[str, NativeOps], formats: Sequence[str], rounds: int) -> None:
    """Whole steps: begin, all layers, final norm, logits."""
    models = {"torch": _Model(OneDnnOps())}
    for key, ops in backends.items():
        models |= {f"{key}-{form}": _Model(ops, form) for form in formats}
    for name, rows in BATCHES.items():
        runs = {key: model.step(rows) for key, model in models.items()}
        report(f"step, {name}", fastest(runs, rounds), "torch")


def weights(backends: dict[str, NativeOps], formats: Sequence[str], rounds: int, batches: Sequence[int]) -> None:
    """Decode steps of short sequences, and one prefill, against the time of reading the weights once."""
    memory = torch.ones(STREAMED_BYTES // 4)
    for key, ops in backends.items():
        models = {form: _Model(ops, form) for form in formats}
        for batch in (*batches, -PREFILL):
            rows = [(1, 64)] * batch if batch > 0 else [(PREFILL, PREFILL)]
            runs: Runs = {form: model.step(rows) for form, model in models.items()}
            times = fastest({"memory": memory.sum, **runs}, rounds)
            bandwidth = memory.nbytes / times.pop("memory")
            cells = []
            for form, ms in times.items():
                floor = models[form].num_bytes / bandwidth
                cells.append(f"{form} {ms:8.2f} ms = {ms / floor:5.2f} x {models[form].num_bytes / 1e6:.0f} MB")
            name = f"{batch} decodes" if batch > 0 else f"prefill {PREFILL}"
            print(f"{key}, {name:12s} {bandwidth / 1e6:5.1f} GB/s  " + "  ".join(cells), flush=True)


@torch.inference_mode()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", choices=("linear", "attention", "step", "weights"))
    parser.add_argument("--levels", default=available_levels()[0].name)
    parser.add_argument("--formats", default="bfloat16")
    parser.add_argument("--batches", default="1,8,32,64,512")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    wanted, formats = arguments.levels.split(","), arguments.formats.split(",")
    backends = {
        level.name: NativeOps(Library(level), arguments.threads) for level in available_levels() if level.name in wanted
    }
    if arguments.only in (None, "linear"):
        linears(backends, formats, arguments.rounds, [int(batch) for batch in arguments.batches.split(",")])
    if arguments.only in (None, "attention"):
        attention(backends, arguments.rounds)
    if arguments.only in (None, "step"):
        steps(backends, formats, arguments.rounds)
    if arguments.only in (None, "weights"):
        batches = [int(batch) for batch in arguments.batches.split(",") if int(batch) < PREFILL]
        weights(backends, formats, arguments.rounds, batches)


if __name__ == "__main__":
    main()
