"""Bodies of POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import Body

__all__ = ["DetokenizeRequest", "TokenizeChatRequest", "TokenizeRequest"]

MAX_TOKENS = 1 << 20
OptionalModel = Annotated[
    str,
    Field(default_factory=str, max_length=512),
    BeforeValidator(lambda name: "" if name is None else name),
    WithJsonSchema({"anyOf": [{"type": "string", "maxLength": 512}, {"type": "null"}]}),
]
"""Left out or null (and then ""), it is the only model that is served."""


def _ids(value: object) -> object:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("must be a list of token ids")
    if len(value) > MAX_TOKENS:
        raise ValueError(f"at most {MAX_TOKENS} token ids are allowed")
    return tuple(value)


class TokenizeRequest(Body):
    model: OptionalModel
    prompt: str
    add_special_tokens: bool | None = None
    """False leaves out the BOS token of models that want one."""
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest):
    model: OptionalModel
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: OptionalModel
    tokens: Annotated[
        tuple[int, ...], BeforeValidator(_ids), WithJsonSchema({"type": "array", "items": {"type": "integer"}})
    ]
