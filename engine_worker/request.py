"""The engine's only mutable request state. Changed by `engine.apply` and the scheduler, by nobody else.

No torch, no redis: scheduling tests run in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from shared.grammars.backend import TokenMatcher
from shared.params import SamplingParams

__all__ = [
    "FinishReason",
    "Klass",
    "Pooling",
    "PromptLogprobs",
    "Request",
    "RequestStatus",
    "TokenEvent",
    "TokenLogprobs",
]

FinishReason = Literal["stop", "length", "abort", "error"]
Klass = Literal["interactive", "batch"]
Pooling = Literal["", "last", "mean"]


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one HTTP request: a sequence that catches up until it ends.

    There are no phases. Known tokens are prompt + output; each step computes some of those not yet computed; when all
    known tokens are computed a new one is drawn. A take-over arrives with `output_token_ids` already filled and is no
    special case.
    """

    request_id: str
    """"<rid>/<choice index>", unique in this engine."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    """Unsigned 64-bit seed of this choice; the draw at output position p depends on (seed, p) alone."""
    max_tokens: int
    """Output tokens at most, already clamped to the context window; 0 only when nothing but the prompt is measured."""
    stop_token_ids: frozenset[int]
    """Any of these ends the choice with reason "stop": the client's ids and, unless ignore_eos, the model's EOS ids."""
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    klass: Klass = "interactive"
    """Batch requests get only the room that interactive ones leave: seats, tokens of a step, blocks."""
    priority: int = 0
    """Within a class lower runs first; then `arrival`."""
    arrival: int = 0
    """Place in line, lowest first; 0 = by the order in which the engine took it in. Take-overs are negative."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first scheduled."""
    matcher: TokenMatcher | None = None
    """The state of its grammar, when its output has one; follows `output_token_ids` by itself."""
    cache_salt: str = ""
    """Cached prefixes are shared between requests of the same salt only."""
    num_scored: int = 0
    """Prompt tokens, from the second on, whose log-probabilities have been told (`sampling.prompt_logprobs`)."""
    pooling: Pooling = ""
    """An embedding is wanted instead of tokens: the last hidden state, or the mean of all."""
    hidden_sum: list[float] = field(default_factory=list)
    """Sum of the hidden states of the positions computed so far, for an embedding."""

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt + output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_measured(self) -> int:
        """Positions whose hidden states are not needed any more: only those may come from the prefix cache."""
        if self.pooling == "mean":
            return 0
        if self.sampling.prompt_logprobs is None or self.num_scored >= len(self.prompt_token_ids) - 1:
            return self.num_tokens
        return self.num_scored


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's own distribution (before temperature and filters)."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), best first."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of one prompt token, given those before it."""

    token_id: int
    logprob: float
    rank: int
    """1 = no token is more probable."""
    top: tuple[tuple[int, float], ...]


class TokenEvent(NamedTuple):
    """What one step did for one request: a token, an end, or both. Handed to the outbox, which owns text and Redis.

    A tuple because each running request makes one in every step, at a third of a frozen dataclass's cost.
    """

    request_id: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token, when one ended the choice (it is also `token_id`)."""
    error_code: str = ""
    """A code of shared/errors.py when finish_reason is "error"."""
    error_message: str = ""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Of the next prompt tokens; all of them come before the first token of output."""
    embedding: tuple[float, ...] = ()
    """Of unit length; comes with the end of a request that pools."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    exhausted: bool = False
    """Ended with reason "stop" because the request's own fields left no token that could follow."""
