"""What the engine measured, in the form in which it is logged. In: events' nouns. Out: messages and bytes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from engine_worker.request import PromptLogprobs, TokenLogprobs
from shared.messages import PromptLogprob, TokenLogprob

__all__ = ["float32_bytes", "wire_logprobs", "wire_score"]

_IMPOSSIBLE = -9999.0
"""What OpenAI's API says for a probability of zero."""


def wire_logprobs(token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
    top = tuple((other, max(value, _IMPOSSIBLE)) for other, value in logprobs.top)
    return TokenLogprob(token_id=token_id, logprob=max(logprobs.logprob, _IMPOSSIBLE), top=top)


def wire_score(score: PromptLogprobs) -> PromptLogprob:
    return PromptLogprob(token_id=score.token_id, logprob=score.logprob, rank=score.rank, top=score.top)


def float32_bytes(values: Sequence[float]) -> bytes:
    data = array("f", values)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()
