"""What `--simulate` says: how fast a simulated engine pretends to be. Parsed by the command line and by the worker.

In: "tokens_per_s=5000,ttft_ms=200". Out: a frozen Simulation, or ValueError with what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SIMULATION_KEYS", "Simulation", "parse_simulation"]

_RANGES: dict[str, tuple[float, float]] = {
    "tokens_per_s": (0.1, 1e6),
    "stream_tokens_per_s": (0.1, 1e5),
    "ttft_ms": (0, 600_000),
    "answer_tokens": (0, 1_000_000),
    "seed": (0, (1 << 63) - 1),
}
_WHOLE = ("answer_tokens", "seed")
SIMULATION_KEYS = tuple(_RANGES)


@dataclass(frozen=True, slots=True)
class Simulation:
    """At least one of the two rates is finite."""

    tokens_per_s: float = math.inf
    """Of all streams of the worker together."""
    stream_tokens_per_s: float = math.inf
    """Of one stream at most."""
    ttft_ms: float = 0.0
    """From the moment a request has a seat in the batch to its first token."""
    answer_tokens: int = 0
    """Answers end by themselves after half to one and a half times as many tokens; 0: only max_tokens ends them."""
    seed: int = 0
    """Another seed, other tokens."""


def parse_simulation(text: str) -> Simulation:
    """Raises ValueError saying what is allowed."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, given, number = (piece.strip() for piece in part.partition("="))
        if name not in _RANGES or not given or name in values:
            raise ValueError(f"{part.strip()!r} in it is none of {', '.join(f'{key}=N' for key in _RANGES)}, each once")
        values[name] = _number(name, number)
    if not {"tokens_per_s", "stream_tokens_per_s"} & values.keys():
        raise ValueError("it must name tokens_per_s=N, stream_tokens_per_s=N, or both")
    whole = {name: int(values.pop(name)) for name in _WHOLE if name in values}
    return Simulation(**values, **whole)  # type: ignore[arg-type]


def _number(name: str, text: str) -> float:
    low, high = _RANGES[name]
    kind = "whole number" if name in _WHOLE else "number"
    try:
        value: float = int(text) if name in _WHOLE else float(text)
    except ValueError:
        value = math.nan
    if not text.isascii() or not low <= value <= high:
        raise ValueError(f"{name}={text} in it must be a {kind} from {low:g} to {high:.9g}")
    return value
