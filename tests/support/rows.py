"""Plan rows for tests of runner and sampler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine_worker.plan import ScheduledRequest
from shared.params import SamplingParams

__all__ = ["make_row"]


def make_row(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] | list[int] = (),
    *,
    request_id: str = "row",
    start: int = 0,
    num_new_tokens: int | None = None,
    block_table: list[int] | None = None,
    seed: int = 0,
    stop: Iterable[int] = (),
    **params: Any,
) -> ScheduledRequest:
    """A row that computes all its known tokens and samples greedily; `params` are fields of SamplingParams."""
    known = len(prompt) + len(output)
    count = known - start if num_new_tokens is None else num_new_tokens
    return ScheduledRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        output_token_ids=output if isinstance(output, list) else list(output),
        start=start,
        num_new_tokens=count,
        block_table=[0] if block_table is None else block_table,
        samples=start + count == known,
        sampling=SamplingParams(**({"temperature": 0.0} | params)),
        seed=seed,
        stop_token_ids=frozenset(stop),
    )
