"""Engine requests for tests: every field has a default, a test names only what it is about."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from engine_worker.request import Klass, Request
from shared.params import SamplingParams

__all__ = ["make_request"]

_numbers = itertools.count()


def make_request(
    prompt: Sequence[int] | int = 5,
    max_tokens: int = 4,
    *,
    request_id: str = "",
    seed: int = 0,
    stop: Iterable[int] = (),
    output: Sequence[int] = (),
    klass: Klass = "interactive",
    priority: int = 0,
    arrival: int | None = None,
    salt: str = "",
    sampling: SamplingParams | None = None,
    **params: Any,
) -> Request:
    """A greedy request; `prompt` may be a length (tokens 1, 2, 3, …), `params` are fields of SamplingParams."""
    number = next(_numbers)
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    return Request(
        request_id=request_id or f"request-{number}/0",
        prompt_token_ids=tokens,
        sampling=sampling or SamplingParams(**({"temperature": 0.0} | params)),
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop),
        output_token_ids=list(output),
        klass=klass,
        priority=priority,
        arrival=number if arrival is None else arrival,
        cache_salt=salt,
    )
