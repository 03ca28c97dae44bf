"""The engine's own door: what could break or stall a step is refused here, even if a pod has let it through."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine_worker.request import Request
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.params import SamplingParams, last_ban

__all__ = ["check_request"]

_MAX_SEED = (1 << 64) - 1


def check_request(request: Request, *, vocab_size: int, max_request_tokens: int) -> None:
    """Raises InvalidRequest naming the parameter, ContextLengthExceeded when the request can never fit."""
    if not request.prompt_token_ids:
        raise InvalidRequest("The prompt has no tokens: at least one is needed.", param="prompt")
    measures = request.pooling or request.sampling.prompt_logprobs is not None
    if request.max_tokens < (0 if measures else 1):
        raise InvalidRequest(f"max_tokens is {request.max_tokens}, allowed is 1 or more.", param="max_tokens")
    needed = len(request.prompt_token_ids) + request.max_tokens
    if needed > max_request_tokens:
        raise ContextLengthExceeded(
            f"The prompt has {len(request.prompt_token_ids)} tokens and up to {request.max_tokens} are to be "
            f"generated; together this engine holds {max_request_tokens} at most.",
            param="max_tokens",
        )
    _check_ids("prompt", request.prompt_token_ids, vocab_size)
    _check_ids("output", request.output_token_ids, vocab_size)
    _check_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    if not 0 <= request.seed <= _MAX_SEED:
        raise InvalidRequest("seed must be an unsigned 64-bit number here.", param="seed")
    _check_sampling(request.sampling, vocab_size)
    _check_possible(request, vocab_size)


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Ranges within which every number of the sampler stays meaningful; what a client may send is narrower."""
    ranges = {
        "temperature": (params.temperature, 0.0, 1e6),
        "top_p": (params.top_p, 0.0, 1.0),
        "min_p": (params.min_p, 0.0, 1.0),
        "presence_penalty": (params.presence_penalty, -100.0, 100.0),
        "frequency_penalty": (params.frequency_penalty, -100.0, 100.0),
        "repetition_penalty": (params.repetition_penalty, 1e-3, 1e3),
        "min_tokens": (params.min_tokens, 0, math.inf),
        "logprobs": (params.logprobs or 0, 0, vocab_size),
        "prompt_logprobs": (params.prompt_logprobs or 0, 0, vocab_size),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:  # also true of NaN
            raise InvalidRequest(f"{name} is {value}, allowed is {low} to {high}.", param=name)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for word in params.bad_words:
        _check_ids("bad_words", word, vocab_size)
        if not word:
            raise InvalidRequest("bad_words holds a word without tokens.", param="bad_words")
    for token, bias in params.logit_bias.items():
        # Minus infinity is a ban; plus infinity would leave no finite distribution.
        if math.isnan(bias) or bias == math.inf:
            raise InvalidRequest(f"logit_bias of token {token} is {bias}, allowed are numbers.", param="logit_bias")


def _check_possible(request: Request, vocab_size: int) -> None:
    """Something must be left to draw. What only the answer itself can use up is the engine's to end."""
    if request.max_tokens == 0 or request.matcher is not None:
        return
    name = last_ban(request.sampling, request.stop_token_ids, vocab_size)
    if name is not None:
        raise InvalidRequest(f"{name} leaves no token that an answer could begin with.", param=name)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"{name} names token {wrong}, allowed are 0 to {vocab_size - 1}.", param=name)
