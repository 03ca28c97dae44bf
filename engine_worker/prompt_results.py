"""What a step measured of a prompt, taken into its request: scores to tell, hidden states summed up to an embedding.

Part of the engine's `_apply`: the engine thread alone comes here.
"""

from __future__ import annotations

import math

from engine_worker.plan import ScheduledRequest
from engine_worker.request import Request, TokenEvent
from engine_worker.runner.measure import Measured

__all__ = ["embedding_of", "take_measured"]


def take_measured(request: Request, row: ScheduledRequest, measured: Measured) -> list[TokenEvent]:
    """The event that tells new prompt log-probabilities, if there are any."""
    if measured.hidden_sum:
        # A preempted request begins again at 0, and so does its sum.
        before = request.hidden_sum if request.pooling == "mean" and row.start > 0 else [0.0] * len(measured.hidden_sum)
        request.hidden_sum = [a + b for a, b in zip(before, measured.hidden_sum, strict=True)]
    if not measured.scores:
        return []
    request.num_scored += len(measured.scores)
    return [TokenEvent(request.request_id, prompt_logprobs=measured.scores)]


def embedding_of(request: Request) -> tuple[float, ...]:
    """Pooled hidden states scaled to length 1 (so the number of positions drops out); () when none is wanted or yet
    known."""
    if not request.pooling or request.num_computed_tokens < request.num_tokens or not request.hidden_sum:
        return ()
    length = math.sqrt(math.fsum(x * x for x in request.hidden_sum))
    return tuple(x / length for x in request.hidden_sum) if length > 0 else tuple(request.hidden_sum)
