"""The OpenAPI document: what each route takes and every way in which it answers, as the routes declare it.

In: body models, answer types and error classes. Out: keyword arguments of the route decorators, and the document as a
whole. The routes parse bodies and write JSON by themselves, so nothing here runs for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from api_service.schemas.common import Body
from api_service.schemas.reports import ErrorBody, StreamError
from shared import errors

__all__ = ["GENERATION_ERRORS", "QUEUE_HEADERS", "body_of", "describe", "refusals", "stream_of"]

_REF = "#/components/schemas/{model}"
_DESCRIPTIONS = {
    400: "A field that cannot be honoured; `param` names it.",
    401: "No valid API key.",
    404: "No such model, or nothing of this name.",
    405: "The path exists, the method does not.",
    408: "The request did not arrive in time, or its deadline passed before it was started.",
    410: "The stream has ended and is no longer kept.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full, or the caller's own limit is reached.",
    431: "The headers are too large.",
    499: "The request was cancelled.",
    500: "The server failed on this request.",
    503: "Redis or a worker cannot be reached, or the server is full or shutting down.",
}
_RETRY_AFTER = {429, 503}
_EVERYWHERE: Sequence[type[errors.HeadraceError]] = (
    errors.BodyTooLarge,
    errors.EngineFailure,
    errors.HeadersTooLarge,
    errors.RequestTimeout,
)
GENERATION_ERRORS: Sequence[type[errors.HeadraceError]] = (
    errors.InvalidRequest,
    errors.ModelNotFound,
    errors.DeadlineExceeded,
    errors.UnsupportedMediaType,
    errors.QueueFull,
    errors.RequestCancelled,
    errors.RedisUnavailable,
)
"""What every request that is queued for a worker can meet."""

_SECONDS = {"type": "number", "exclusiveMinimum": 0}
QUEUE_HEADERS: list[dict[str, Any]] = [
    {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "The same key and body again give the answer of the first request.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    },
    {
        "name": "X-Request-Timeout",
        "in": "header",
        "description": "Seconds in which the request must have been started.",
        "schema": {**_SECONDS, "maximum": 86_400},
    },
    {
        "name": "X-Headrace-Keep-Running",
        "in": "header",
        "description": "Seconds the request goes on after its client has gone.",
        "schema": {**_SECONDS, "maximum": 3600},
    },
]


def body_of(*models: type[Body], headers: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """`openapi_extra` of a route that parses its body itself, as one of these models; `headers` are parameters."""
    schemas = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    _BODIES.update(dict.fromkeys(models))
    content = {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    return {"requestBody": {"required": True, "content": content}, **({"parameters": [*headers]} if headers else {})}


_BODIES: dict[type[Body], None] = {}
"""Every body model that a route named."""
_SPOKEN_OF: dict[type[Any], None] = {}
"""The same of events."""


def refusals(*classes: type[errors.HeadraceError]) -> dict[int | str, dict[str, Any]]:
    """`responses` entries of these errors, and of those that any route may answer with."""
    statuses = sorted({error.status for error in (*classes, *_EVERYWHERE)})
    return {status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}


def stream_of(*chunks: type[Any]) -> dict[str, Any]:
    """The `content` of a streamed answer. What each event holds is told as OpenAPI 3.2 does, which FastAPI does too."""
    objects = [{"$ref": _REF.format(model=kind.__name__)} for kind in (*chunks, StreamError)]
    _SPOKEN_OF.update(dict.fromkeys((*chunks, StreamError)))
    about = (
        "The last event is `[DONE]`, or an error when the request failed. Lines that begin with a colon are comments."
    )
    data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": objects}}
    event = {
        "type": "object",
        "description": about,
        "properties": {"id": {"type": "string"}, "data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }
    return {"text/event-stream": {"itemSchema": event}}


def describe(app: FastAPI, *, keys: bool, public: Sequence[str]) -> None:
    """Makes `app.openapi()` the whole document. `keys`: whether clients need one, but for the `public` paths."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            whole = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=app.servers)
            app.openapi_schema = _completed(whole, keys, public)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(whole: dict[str, Any], keys: bool, public: Sequence[str]) -> dict[str, Any]:
    components = whole.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    _, bodies = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REF)
    schemas |= bodies["$defs"]
    for kind in _SPOKEN_OF:
        schema = TypeAdapter(kind).json_schema(ref_template=_REF)
        schemas |= {**schema.pop("$defs", {}), kind.__name__: schema}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            _complete(operation, keys and path not in public)
    return whole


def _complete(operation: dict[str, Any], guarded: bool) -> None:
    """Request ids in and out, the key, and no 422: parameters that do not fit are a 400 of ours."""
    responses = operation["responses"]
    responses.pop("422", None)
    if guarded:
        operation["security"] = [{"key": []}]
        refusal = {"schema": {"$ref": _REF.format(model=ErrorBody.__name__)}}
        responses["401"] = {"description": _DESCRIPTIONS[401], "content": {"application/json": refusal}}
    for status, response in responses.items():
        headers = response.setdefault("headers", {})
        headers["x-request-id"] = {"required": True, "schema": {"type": "string"}}
        if int(status) in _RETRY_AFTER and "ErrorBody" in str(response):
            headers["retry-after"] = {"schema": {"type": "string", "pattern": r"^\d+$"}}
    operation["responses"] = dict(sorted(responses.items()))
