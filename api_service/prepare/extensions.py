"""Fields that vLLM has and OpenAI has not, and fill-in-the-middle: what they do to tokens and to the queued request.

In: a checked body and token ids. Out: token ids, and fields of the GenerateRequest.
"""

from __future__ import annotations

from typing import Any

from api_service.prepare.model import ServedModel
from api_service.schemas.common import GenerationBody, QueuedBody
from shared.errors import InvalidRequest

__all__ = ["extensions", "fill_in_the_middle", "truncated"]

_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)
"""Of Qwen and CodeGemma, StarCoder, SantaCoder: prefix, suffix, then the model writes what is between."""


def extensions(body: GenerationBody) -> dict[str, Any]:
    """Fields of a GenerateRequest that only pass through."""
    return {
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt or "",
        "prompt_logprobs": body.prompt_logprobs,
        "return_token_ids": bool(body.return_token_ids),
    }


def truncated(body: QueuedBody, ids: list[int], model: ServedModel, asked: int | None) -> list[int]:
    """The last `truncate_prompt_tokens` ids; for -1 as many as leave room for the tokens asked for (None: one)."""
    count = body.truncate_prompt_tokens
    if count is None:
        return ids
    return ids[-(max(1, model.window - (1 if asked is None else asked)) if count == -1 else count) :]


def fill_in_the_middle(model: ServedModel, prompt: list[int], suffix: str) -> list[int]:
    """Raises InvalidRequest when the model was not trained for it: it would only see two texts in a row."""
    known = model.vocabulary.added_tokens_encoder
    for names in _FIM_TOKENS:
        if all(name in known for name in names):
            before, after, middle = (known[name] for name in names)
            return [before, *prompt, after, *model.vocabulary.encode(suffix), middle]
    raise InvalidRequest(
        f"The model '{model.card.name}' has no fill-in-the-middle tokens, so 'suffix' is not supported.", param="suffix"
    )
