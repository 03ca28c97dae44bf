"""The worker's own check of what came through the queue: a pod may be newer or wrong, the engine must not suffer.

In: a decoded request and what this worker's model and cache allow. Out: nothing, or the error for the caller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import GenerateRequest
from shared.params import SamplingParams, StopConditions
from shared.text.token_bytes import TokenBytes

__all__ = ["ServedModel", "check_request"]

_MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the asyncio side knows of the model."""

    name: str
    token_bytes: TokenBytes
    vocab_size: int
    max_model_len: int
    """Prompt + output tokens of one choice by the model's window or the operator's limit."""
    max_request_tokens: int
    """The same by what the paged cache can ever hold."""
    eos_token_ids: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        """Prompt + output tokens that one choice may have here."""
        return min(self.max_model_len, self.max_request_tokens)


def check_request(request: GenerateRequest, served: ServedModel) -> None:
    """Raises InvalidRequest, or ContextLengthExceeded when a prompt cannot fit."""
    _require(request.model == served.name, "model", f"this worker serves {served.name}")
    _require(request.n >= 1 and 1 <= request.num_choices <= _MAX_CHOICES, "n", f"1 to {_MAX_CHOICES} choices")
    _require(request.klass in ("interactive", "batch"), "klass", "interactive or batch")
    for prompt in request.prompts:
        _require(len(prompt) > 0, "prompt", "at least one token")
        _check_ids(prompt, served.vocab_size, "prompt")
        if len(prompt) >= served.max_tokens:
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt)} tokens; this model takes at most {served.max_tokens - 1} "
                f"and needs room for one token of output.",
                param="prompt",
            )
    _check_stop(request.stop, served.vocab_size)
    _check_sampling(request.sampling, served.vocab_size)


def _check_stop(stop: StopConditions, vocab_size: int) -> None:
    _require(stop.max_tokens >= 0, "max_tokens", "0 or more")
    _require(all(stop.stop), "stop", "strings that are not empty")
    _check_ids(stop.stop_token_ids, vocab_size, "stop_token_ids")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    _check_ids(tuple(sampling.logit_bias), vocab_size, "logit_bias")
    _require(all(math.isfinite(bias) for bias in sampling.logit_bias.values()), "logit_bias", "finite numbers")
    _require(_within(sampling.temperature, 0, math.inf), "temperature", "0 or more")
    _require(_within(sampling.top_p, 0, 1), "top_p", "0 to 1")
    _require(_within(sampling.min_p, 0, 1), "min_p", "0 to 1")
    _require(sampling.top_k >= 0, "top_k", "0 or more")
    _require(
        _within(sampling.repetition_penalty, 0, math.inf) and sampling.repetition_penalty > 0,
        "repetition_penalty",
        "more than 0",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        _require(math.isfinite(getattr(sampling, name)), name, "a finite number")
    _require(sampling.min_tokens >= 0, "min_tokens", "0 or more")
    _require(sampling.logprobs is None or 0 <= sampling.logprobs <= vocab_size, "logprobs", "0 or more")
    _require(0 <= sampling.seed < 1 << 64, "seed", "an unsigned 64-bit number")


def _within(value: float, least: float, most: float) -> bool:
    """False for NaN and for infinities."""
    return math.isfinite(value) and least <= value <= most


def _check_ids(ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    _require(all(0 <= token_id < vocab_size for token_id in ids), param, f"token ids from 0 to {vocab_size - 1}")


def _require(fits: bool, param: str, allowed: str) -> None:
    if not fits:
        raise InvalidRequest(f"{param} is out of range for the worker: allowed is {allowed}.", param=param)
