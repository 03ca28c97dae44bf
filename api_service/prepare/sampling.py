"""Sampling parameters and stop conditions from a body: off-values in one spelling, ids inside the vocabulary.

In: a checked body and a model. Out: SamplingParams, StopConditions (shared/params.py). Where the client is silent the
model's own generation defaults hold, then OpenAI's.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from api_service.prepare.grammar import output_grammar
from api_service.prepare.model import ServedModel
from api_service.schemas.common import GenerationBody
from shared.errors import InvalidRequest
from shared.params import SamplingParams, StopConditions, last_ban

__all__ = ["check_possible", "check_token_ids", "sampling_params", "stop_conditions"]

_GREEDY_BELOW = 1e-5
"""A temperature so small divides logits into infinities; its limit is greedy."""


def check_token_ids(ids: Iterable[int], model: ServedModel, param: str) -> None:
    """Raises InvalidRequest when an id is outside the vocabulary: behind this door ids are used as indices."""
    if any(not 0 <= token_id < model.card.vocab_size for token_id in ids):
        raise InvalidRequest(f"'{param}' holds a token id outside 0 … {model.card.vocab_size - 1}.", param=param)


def sampling_params(
    body: GenerationBody, model: ServedModel, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """`logprobs`: how many best alternatives are wanted, None for no log-probabilities. Raises InvalidRequest."""
    defaults = model.card.defaults
    check_token_ids(body.logit_bias, model, "logit_bias")
    check_token_ids(body.allowed_token_ids or (), model, "allowed_token_ids")
    temperature = _given(body.temperature, defaults.get("temperature"), 1.0)
    top_p = _given(body.top_p, defaults.get("top_p"), 1.0)
    top_k = int(_given(body.top_k, defaults.get("top_k"), 0))
    if temperature < _GREEDY_BELOW or top_p <= 0 or top_k == 1:  # each keeps the best token only
        temperature, top_p, top_k = 0.0, 1.0, 0
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k <= 0 or top_k >= model.card.vocab_size else top_k,
        min_p=_given(body.min_p, defaults.get("min_p"), 0.0),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
        logit_bias={token_id: bias for token_id, bias in body.logit_bias.items() if bias},
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        bad_words=_bad_words(body.bad_words, model),
        allowed_token_ids=body.allowed_token_ids,
        grammar=output_grammar(body, model),
    )


def check_possible(sampling: SamplingParams, stop: StopConditions, model: ServedModel) -> None:
    """Raises InvalidRequest when the fields together leave no token to begin with. A grammar wins over them all."""
    if sampling.grammar is not None or stop.max_tokens == 0:
        return
    stop_ids = {*stop.stop_token_ids, *(() if stop.ignore_eos else model.card.eos_token_ids)}
    name = last_ban(sampling, stop_ids, model.card.vocab_size)
    if name is not None:
        among = "" if sampling.allowed_token_ids is None else " of 'allowed_token_ids'"
        why = f"'{name}' leaves no token{among} that an answer could begin with."
        raise InvalidRequest(why, param=name)


def _bad_words(words: Iterable[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, at the start of a text and after a space."""
    sequences = [tuple(model.vocabulary.encode(lead + word.strip())) for word in words for lead in ("", " ")]
    return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))


def _given(value: float | None, default: float | None, fallback: float) -> float:
    chosen = value if value is not None else default
    return fallback if chosen is None else float(chosen)


def stop_conditions(body: GenerationBody, model: ServedModel, max_tokens: int) -> StopConditions:
    """Raises InvalidRequest for ids outside the vocabulary and for min_tokens above the limit."""
    check_token_ids(body.stop_token_ids, model, "stop_token_ids")
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"'min_tokens' must be at most max_tokens, which is {max_tokens}.", param="min_tokens")
    return StopConditions(
        max_tokens=max_tokens,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
