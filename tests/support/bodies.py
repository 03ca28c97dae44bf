"""Bodies of requests, parsed and checked as a route does it, and how one of them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import parse
from api_service.schemas.completion import CompletionRequest
from shared.errors import InvalidRequest

__all__ = ["USER", "chat", "completion", "refused"]

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> ChatCompletionRequest:
    body = parse(ChatCompletionRequest, {"model": "m", "messages": [USER], **fields})
    body.check()
    return body


def completion(**fields: Any) -> CompletionRequest:
    body = parse(CompletionRequest, {"model": "m", "prompt": "Hi", **fields})
    body.check()
    return body


def refused(make: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        make(**fields)
    assert len(error.value.message) < 400
    for leak in ("ctx", "input_value", "errors.pydantic.dev", "type="):
        assert leak not in error.value.message
    return error.value
