"""The worker's own check of a whole request: a pod may be newer or wrong, and the engine sees only single choices.

In: a decoded request and what this worker serves. Out: nothing, or the error for the caller. The ranges of sampling
parameters and token ids are the engine's own door (admission.py), which every choice passes too.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.grammars.compiler import GrammarCompiler
from shared.messages import GenerateRequest
from shared.text.token_bytes import TokenBytes

__all__ = ["ServedModel", "check_request"]

_MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the asyncio side knows of the model."""

    name: str
    token_bytes: TokenBytes
    max_request_tokens: int
    """Prompt + output tokens that one choice may have here."""
    eos_token_ids: tuple[int, ...]
    grammars: GrammarCompiler | None = None
    """None: this model cannot do structured output."""


def check_request(request: GenerateRequest, served: ServedModel) -> None:
    """Raises InvalidRequest, or ContextLengthExceeded when a prompt cannot fit."""
    _require(request.model == served.name, "model", f"this worker serves {served.name}")
    countable = request.n >= 1 and 1 <= request.num_choices <= _MAX_CHOICES
    _require(countable, "n", f"allowed are 1 to {_MAX_CHOICES} choices")
    _require(request.klass in ("interactive", "batch"), "klass", "allowed are interactive and batch")
    _require(all(request.stop.stop), "stop", "a stop string must not be empty")
    _require(request.stop.max_tokens >= 0, "max_tokens", "allowed is 0 or more")
    for prompt in request.prompts:
        _require(len(prompt) > 0, "prompt", "at least one token is needed")
        most = served.max_request_tokens - min(request.stop.max_tokens, 1)
        if len(prompt) > most:
            why = f"The prompt has {len(prompt)} tokens. This worker takes at most {most} of such a request."
            raise ContextLengthExceeded(why, param="prompt")


def _require(fits: bool, param: str, rule: str) -> None:
    if not fits:
        raise InvalidRequest(f"The worker cannot run this request: {param}: {rule}.", param=param)
