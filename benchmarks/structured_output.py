"""Time per token with and without a grammar: python -m benchmarks.structured_output [--rows 1 8 16] [--tokens 96]

In: the default model, loaded here, no Redis. Out: one line per number of rows: milliseconds per step without and with a
grammar, taken in turns so that a busy machine bothers both alike, and their ratio (target: at most 1.3).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from benchmarks._engine_run import timed_step
from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from engine_worker.request import Request
from shared.grammars.compiler import GrammarCompiler
from shared.params import GrammarSpec, SamplingParams
from shared.text.token_bytes import TokenBytes

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 50,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
                "required": ["name", "age"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}
"""Never complete within the benchmark: both runs draw as many tokens."""
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    loaded = load("")
    table = TokenBytes.from_tokenizer_json(loaded.tokenizer_json)
    grammars = GrammarCompiler(loaded.tokenizer_json, table, loaded.eos_token_ids, loaded.config.vocab_size)
    engine = Engine(loaded, EngineConfig(num_blocks=2048))
    for rows in arguments.rows:
        measured: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for constrained in measured:
                measured[constrained].append(
                    _run(engine, loaded, grammars if constrained else None, rows, arguments.tokens)
                )
        free, bound = (statistics.median(measured[constrained]) for constrained in (False, True))
        print(f"{rows:3} rows: {free:.2f} ms a step without, {bound:.2f} with a grammar, ratio {bound / free:.2f}")


def _run(engine: Engine, loaded: LoadedModel, grammars: GrammarCompiler | None, rows: int, tokens: int) -> float:
    """Median milliseconds of a step that decodes all rows."""
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    for i in range(rows):
        matcher = None if grammars is None else grammars.matcher(spec, tokens)
        stop = frozenset[int]() if grammars is None else frozenset(loaded.eos_token_ids)
        engine.add(Request(f"r{i}", [1, 4093, 198], SamplingParams(temperature=0.8), i, tokens, stop, matcher=matcher))
    times = []
    while engine.has_work:
        started = time.perf_counter()
        timed_step(engine)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * 1000


if __name__ == "__main__":
    main()
