"""Length rules: what fits, what max_tokens becomes, and a bound that needs no tokenizer.

In: counts. Out: an answer's token limit, or ContextLengthExceeded with the true numbers.
"""

from __future__ import annotations

from api_service.prepare.model import ServedModel
from shared.errors import ContextLengthExceeded, InvalidRequest

__all__ = ["COMPLETION_DEFAULT_TOKENS", "answer_limit", "check_text_length"]

COMPLETION_DEFAULT_TOKENS = 16
"""OpenAI's documented default of the text endpoint."""


def check_text_length(model: ServedModel, text: str, param: str) -> None:
    """Refuses a text that cannot fit whatever its tokens are, before any time is spent on tokenizing it.

    Characters stand for bytes (a character has at least one), so this never refuses a text that would have fitted.
    """
    least = len(text) // model.vocabulary.longest_token
    if least > model.window:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.window} tokens. "
            f"However, your text comes to at least {least} tokens. Please reduce its length.",
            param=param,
        )


def answer_limit(
    model: ServedModel, prompt_tokens: int, asked: int | None, *, default: int | None, param: str, asked_param: str
) -> int:
    """max_tokens of an answer to a prompt of this many tokens. `default` None means: all the room that is left.

    `asked` 0: there is no answer, the prompt may fill the window. Raises InvalidRequest for an empty prompt and
    ContextLengthExceeded when prompt, or prompt and answer, do not fit.
    """
    if prompt_tokens == 0:
        raise InvalidRequest(f"'{param}' must not be empty: it came to 0 tokens.", param=param)
    room = model.window - prompt_tokens
    limit = f"This model's maximum context length is {model.window} tokens."
    if room < (0 if asked == 0 else 1):
        why = "" if asked == 0 else ", which leaves no room for an answer"
        raise ContextLengthExceeded(
            f"{limit} However, your prompt resulted in {prompt_tokens} tokens{why}. Please reduce its length.",
            param=param,
        )
    if asked is not None and asked > room:
        raise ContextLengthExceeded(
            f"{limit} However, you requested {prompt_tokens + asked} tokens ({prompt_tokens} in the prompt, "
            f"{asked} in the completion). Please reduce the prompt or the completion.",
            param=asked_param,
        )
    if asked is not None:
        return asked
    return room if default is None else min(default, room)
