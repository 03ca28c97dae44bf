"""Sampling parameters and stop conditions of a request: plain frozen dataclasses, standard library only.

Pods make them, msgspec carries them, the engine reads them. Off-values are normalised at the border (in the pod),
so every layer behind it sees one spelling: temperature 0 = greedy, top_k 0 = off, top_p 1 = off, min_p 0 = off.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["BAN", "GrammarSpec", "SamplingParams", "StopConditions", "choice_seed", "last_ban"]

BAN = -100.0
"""A bias this low is a ban and not a large handicap, as OpenAI documents the ends of the range."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the whole output has to match. Checked by the pod, compiled by every worker that runs the request."""

    kind: Literal["json_schema", "regex", "lark"]
    """"lark" is llguidance's dialect of it, or llama.cpp's GBNF."""
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. `seed` is always set: the pod draws one when the client gives none, so that a
    continuation on another worker draws the same numbers."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    """No stop token may be drawn before this many output tokens."""
    logprobs: int | None = None
    """None: no log-probabilities; k >= 0: the chosen token's and those of the k best."""
    grammar: GrammarSpec | None = None
    """Structured output: only tokens that can still lead to a match are drawn, EOS only where the match is complete."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for every token of the prompt but the first, which nothing comes before."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    allowed_token_ids: tuple[int, ...] | None = None
    """None: all; else nothing but these may be drawn."""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a choice ends. Token rules are the engine's, `stop` strings are matched on text by the outbox."""

    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Given by the client; the model's EOS ids come from its card and count unless `ignore_eos`."""
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


def last_ban(params: SamplingParams, stop_ids: Collection[int], vocab_size: int) -> str | None:
    """The parameter that takes away the last token which an answer could begin with; None while there is one.

    `stop_ids`: every id that ends the answer. A grammar's own demands win over these fields, so it is not looked at.
    """
    bans = {
        "logit_bias": {token for token, bias in params.logit_bias.items() if bias <= BAN},
        "bad_words": {word[0] for word in params.bad_words if len(word) == 1},
        "min_tokens": set(stop_ids) if params.min_tokens else set(),
    }
    if params.allowed_token_ids is None and sum(map(len, bans.values())) < vocab_size:
        return None
    left = set(range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids)
    for name, banned in bans.items():
        left -= banned
        if not left:
            return name
    return None


def choice_seed(seed: int, choice: int) -> int:
    """Seed of the `choice`-th of n answers, an unsigned 64-bit number; choice 0 of n equals the n=1 run.

    splitmix64's increment keeps neighbouring choices apart (Steele, Lea, Flood 2014).
    """
    return (seed + choice * _GOLDEN) & _MASK64
