"""What is wanted of a prompt's hidden states besides the next token: log-probabilities of its tokens, or an embedding.

In: final hidden states of a batch. Out: numbers on the host. Logits of a prompt exist for some tens of positions at a
time: a long prompt times the vocabulary would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.models.base import Model
from engine_worker.plan import ScheduledRequest
from engine_worker.request import PromptLogprobs

__all__ = ["Measured", "measure"]

_LOGITS_AT_ONCE = 1 << 22
"""Numbers, 16 MiB: 85 positions of a vocabulary of 49,152."""
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one row's new positions."""

    scores: tuple[PromptLogprobs, ...] = ()
    """Of the prompt tokens that these positions predict."""
    hidden_sum: tuple[float, ...] = ()
    """[H]: sum over the positions ("mean"), or the last one's hidden state ("last")."""


def measure(model: Model, hidden: Tensor, rows: Sequence[ScheduledRequest]) -> dict[int, Measured]:
    """hidden [T, H] of all rows, one after the other -> what was asked of some, by row."""
    measured: dict[int, Measured] = {}
    if not any(row.pooling or row.sampling.prompt_logprobs is not None for row in rows):
        return measured
    start = 0
    for i, row in enumerate(rows):
        own = hidden[start : start + row.num_new_tokens]
        start += row.num_new_tokens
        if row.pooling:
            pooled = own.double().sum(0) if row.pooling == "mean" else own[-1].double()
            measured[i] = Measured(hidden_sum=tuple(pooled.tolist()))
        elif row.sampling.prompt_logprobs is not None:
            scores = _scores(model, own, row, row.sampling.prompt_logprobs)
            if scores:
                measured[i] = Measured(scores)
    return measured


def _scores(model: Model, hidden: Tensor, row: ScheduledRequest, count: int) -> tuple[PromptLogprobs, ...]:
    """Position p predicts prompt token p + 1. Those told before a preemption or by an earlier worker are left out."""
    first = max(row.start, row.num_scored)
    end = min(row.start + row.num_new_tokens, len(row.prompt_token_ids) - 1)
    at_once = max(1, _LOGITS_AT_ONCE // model.config.vocab_size)
    scores: list[PromptLogprobs] = []
    for begin in range(first, end, at_once):
        stop = min(begin + at_once, end)
        logits = model.compute_logits(hidden[begin - row.start : stop - row.start])
        scores += _score(logits, row.prompt_token_ids[begin + 1 : stop + 1], count)
    return tuple(scores)


def _score(logits: Tensor, tokens: Sequence[int], count: int) -> list[PromptLogprobs]:
    """logits float32 [m, V], tokens [m] -> one entry each. The same number for a token, chosen or among the best."""
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = logits.gather(-1, ids)
    ranks = (logits > chosen).sum(-1) + 1
    total = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(min(count, logits.shape[1]))
    own = (chosen - total).clamp_(min=_IMPOSSIBLE)[:, 0].tolist()
    values = (best.values - total).clamp_(min=_IMPOSSIBLE).tolist()
    return [
        PromptLogprobs(token, logprob, rank, tuple(zip(top_ids, top_values, strict=True)))
        for token, logprob, rank, top_ids, top_values in zip(
            tokens, own, ranks.tolist(), best.indices.tolist(), values, strict=True
        )
    ]
