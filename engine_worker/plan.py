"""What the scheduler hands to the runner: one frozen batch. Prefill chunks and decodes share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.grammars.backend import TokenMatcher
from shared.params import SamplingParams

__all__ = ["BatchPlan", "ScheduledRequest"]


class ScheduledRequest(NamedTuple):
    """One row of the batch. Lists are the request's own (views, not copies): the runner reads them in the step only.

    A tuple because hundreds are made in every step, at a fifth of a frozen dataclass's cost.
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    start: int
    """First position computed in this step (= num_computed_tokens before it)."""
    num_new_tokens: int
    """Positions start … start + num_new_tokens - 1 are computed; >= 1."""
    block_table: list[int]
    """Covers at least start + num_new_tokens positions."""
    samples: bool
    """Whether the last position is the last known token, so that a new token is drawn from its logits."""
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    """For min_tokens: these may not be drawn while fewer output tokens exist."""
    num_scored: int = 0
    """Prompt tokens, from the second on, that need no log-probabilities any more."""
    pooling: str = ""
    """Not "": the hidden states are wanted, of the last position or ("mean") the sum over all."""
    matcher: TokenMatcher | None = None
    """Rules out tokens, when the output has a grammar."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step. Rows in the order the runner computes them; an empty plan is never handed over."""

    step: int
    rows: tuple[ScheduledRequest, ...]
    num_tokens: int
    """Sum of num_new_tokens, at most the token budget."""
    preempted: tuple[str, ...] = ()
    """Requests that lost their blocks to make room for this batch."""
