"""What a step costs besides its kernels: scheduling, plan, tensors, sampling glue, events and their hand-off.

The engine runs with a model that computes nothing (its outputs are there already) over a vocabulary of 320, so that
the kernels of the sampler cost nothing either; what is left is overhead. Figures are microseconds a step, medians:

- `plan`, `tensors`, `sampling`, `other`: inside `Engine.step`; `step` is the whole of it.
- `loop`: a step driven by the engine thread, with events delivered to an asyncio thread (one step after the other).

    python -m benchmarks.step_overhead [--running 1,8,32,64] [--steps 400] [--params default,greedy,penalties,logprobs]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._engine_run import timed_step
from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.engine_loop import EngineLoop
from engine_worker.faults import Faults
from engine_worker.models.base import LoadedModel, Model
from engine_worker.models.loading.loader import load
from engine_worker.request import Request, TokenEvent
from kernels.ops import BatchLayout, KVCache, ModelOutput
from shared.params import SamplingParams
from tests.support.tiny_model import make_tiny_llama

LIMIT_US = 1000.0
"""At 32 running requests."""
PARAMS = {
    "default": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, top_k=40),
    "penalties": SamplingParams(temperature=0.7, presence_penalty=0.5, repetition_penalty=1.1),
    "logprobs": SamplingParams(logprobs=5),
}


class NoModel:
    """Outputs that were there before."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.config, self.device = model.config, model.device
        generator = torch.Generator().manual_seed(0)
        self._hidden = torch.zeros(8192, 8)
        self._logits = torch.randn(4096, model.config.vocab_size, generator=generator)
        self._best = self._logits.argmax(-1)
        self._peaks = self._logits.amax(-1)

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return self._model.new_kv_cache(num_blocks, block_size)

    def forward(
        self,
        token_ids: Tensor,
        layout: BatchLayout,
        kv_cache: KVCache,
        sample_at: Tensor | None,
        wanted: Sequence[int],
    ) -> ModelOutput:
        sampled = layout.num_tokens if sample_at is None else sample_at.numel()
        return ModelOutput(
            self._hidden[: layout.num_tokens],
            self._logits[: len(wanted)].clone(),
            self._best[:sampled].clone(),
            self._peaks[:sampled].clone(),
        )


class Timer:
    """Adds up the seconds that a method of an object takes."""

    def __init__(self, owner: Any, name: str) -> None:
        self.total = 0.0
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.total += time.perf_counter() - start

        setattr(owner, name, timed)

    def take(self) -> float:
        total, self.total = self.total, 0.0
        return total


def make_engine(loaded: LoadedModel, running: int) -> Engine:
    stub = dataclasses.replace(loaded, model=NoModel(loaded.model))
    return Engine(stub, EngineConfig(max_num_seqs=running, num_blocks=running * 40, max_num_batched_tokens=2048))


def fill(engine: Engine | EngineLoop, running: int, params: SamplingParams) -> None:
    rng = random.Random(0)
    for number in range(running):
        prompt = [rng.randrange(300) for _ in range(rng.randint(20, 60))]
        engine.add(Request(f"{number}/0", prompt, params, number, max_tokens=440, stop_token_ids=frozenset()))


def inside(loaded: LoadedModel, running: int, params: SamplingParams, steps: int) -> dict[str, float]:
    """Microseconds of each part of a step, medians."""
    engine = make_engine(loaded, running)
    timers = {
        "plan": Timer(engine._scheduler, "schedule"),
        "run": Timer(engine._runner, "run"),
        "sampling": Timer(engine._sampler, "sample"),
        "nothing": Timer(engine._runner._model, "forward"),
    }
    fill(engine, running, params)
    for _ in range(20):
        timed_step(engine)
    rounds = []
    for _ in range(min(steps, 400)):
        start = time.perf_counter()
        for timer in timers.values():
            timer.take()
        events = timed_step(engine)
        taken = {name: timer.take() for name, timer in timers.items()}
        whole = time.perf_counter() - start - taken["nothing"]
        assert len(events) == running
        tensors = taken["run"] - taken["nothing"]
        other = whole - taken["plan"] - tensors - taken["sampling"]
        rounds.append(
            {"plan": taken["plan"], "tensors": tensors, "sampling": taken["sampling"], "other": other, "step": whole}
        )
    return {name: statistics.median(r[name] for r in rounds) * 1e6 for name in rounds[0]}


async def loop_steps(loaded: LoadedModel, running: int, params: SamplingParams, steps: int) -> float:
    """Microseconds of a step driven by the engine thread, events delivered; the mean over the run."""
    engine = EngineLoop(make_engine(loaded, running), Faults())
    times: list[float] = []
    done = asyncio.Event()

    def deliver(events: list[TokenEvent]) -> None:
        times.append(time.perf_counter())
        if len(times) > min(steps, 400) + 20:
            done.set()

    fill(engine, running, params)
    engine.start(deliver)
    await done.wait()
    await engine.stop(10)
    # Not the median of the gaps: several steps may be delivered in one go, hardly any time apart.
    return (times[-1] - times[20]) / (len(times) - 21) * 1e6


def main() -> int:
    """Exit code 1 when a step of 32 running requests costs more than a millisecond with default parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,8,32,64")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--params", default=",".join(PARAMS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(str(make_tiny_llama(Path(folder) / "tiny")), dtype="float32", device="cpu")
    for running in map(int, args.running.split(",")):
        for name in args.params.split(","):
            parts = inside(loaded, running, PARAMS[name], args.steps)
            parts["loop"] = asyncio.run(loop_steps(loaded, running, PARAMS[name], args.steps))
            cells = "  ".join(f"{part} {us:5.0f}" for part, us in parts.items())
            print(f"{running:3d} running, {name:9s}: {cells} us", flush=True)
            if running == 32 and name == "default" and parts["step"] > LIMIT_US:
                code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
