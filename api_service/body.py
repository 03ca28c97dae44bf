"""JSON bodies: content type, syntax, depth. Size is the middleware's.

In: a request. Out: a validated model and the raw bytes. Every fault is a 400 (or 415) with one short message; large
bodies are parsed in a thread so that the event loop goes on.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from api_service.schemas.common import Body, parse
from shared.errors import InvalidRequest, UnsupportedMediaType

__all__ = ["INLINE_BYTES", "MAX_DEPTH", "check_content_type", "parse_json"]

MAX_DEPTH = 64
"""Nesting of arrays and objects. Real bodies stay below 30; recursion anywhere behind this door is safe at 64."""
INLINE_BYTES = 32 * 1024
"""Bodies up to this size are parsed on the event loop: a thread would cost more."""

_PATH_LENGTH = 200
_JSON_TYPE = re.compile(r"application/(json|[\w.+-]+\+json)\s*(;.*)?", re.IGNORECASE)
BodyT = TypeVar("BodyT", bound=Body)


def check_content_type(request: Request) -> None:
    """A missing header is taken for JSON. Raises UnsupportedMediaType."""
    given = request.headers.get("content-type")
    if given is not None and not _JSON_TYPE.fullmatch(given.strip()):
        raise UnsupportedMediaType("The body must be JSON: send the header 'Content-Type: application/json'.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Compressed bodies are not accepted.")


def parse_json(data: bytes, model: type[BodyT]) -> BodyT:
    """Raises InvalidRequest: no JSON, no object, too deep, or a bad field."""
    try:
        body = msgspec.json.decode(data)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.DecodeError:
        raise _not_json(data) from None
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(body)
    return parse(model, body)


def _not_json(data: bytes) -> InvalidRequest:
    """Names the number when NaN, an infinity or 1e999 is all that is wrong: Python's own encoder writes those."""
    try:
        body = json.loads(data.decode())
    except RecursionError:
        return _too_deep()
    except ValueError:
        body = None
    path = _non_finite(body)
    if path is None:
        return InvalidRequest("The body is not valid JSON in UTF-8.")
    return InvalidRequest(f"Invalid value for '{path}': must be a finite number.", param=path)


def _non_finite(body: Any) -> str | None:
    """Path of a number that JSON does not have, without recursion."""
    level = [("", body)]
    while level:
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, float) and not math.isfinite(value):
                return path[:_PATH_LENGTH]
            if isinstance(value, dict):
                below += [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
            elif isinstance(value, list):
                below += [(f"{path}[{i}]", item) for i, item in enumerate(value) if not isinstance(item, str | int)]
        level = below
    return None


def _check_depth(body: Any) -> None:
    """Level by level, without recursion."""
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if type(item) is dict else item)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The body is nested too deeply: at most {MAX_DEPTH} levels are allowed.")
