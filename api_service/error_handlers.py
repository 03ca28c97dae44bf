"""Every error as OpenAI's body: our own, the framework's 404 and 405, and what nobody foresaw.

In: exceptions. Out: JSON responses with the status, `Retry-After` and hints that OpenAI's clients read.
"""

from __future__ import annotations

import math

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from api_service.rate_headers import rate_headers
from api_service.sse import json_bytes
from shared.errors import DeadlineExceeded, HeadraceError, InvalidRequest, RateLimited, RequestPoisoned

__all__ = ["add_error_handlers", "error_response"]

_FRAMEWORK_CODES = {404: "not_found", 405: "method_not_allowed"}
_POINTLESS_TO_RETRY = (DeadlineExceeded, RequestPoisoned)
"""OpenAI's clients repeat 408 and 5xx by themselves, unless told not to."""


def error_response(error: HeadraceError) -> Response:
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, RateLimited):
        headers["retry-after-ms"] = str(max(1, math.ceil(1000 * (error.retry_after or 0))))
        headers |= rate_headers(error.use)
    if isinstance(error, _POINTLESS_TO_RETRY):
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _json(error.status, error.body(), headers)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(HeadraceError, _headrace_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)


async def _headrace_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    request.app.state.services.metrics.refused(error.code)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _FRAMEWORK_CODES.get(error.status_code, "invalid_request")
    message = {
        404: f"There is no {request.method} {request.url.path[:200]} here.",
        405: f"{request.method} is not allowed for {request.url.path[:200]}.",
    }.get(error.status_code, str(error.detail)[:300])
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return _json(error.status_code, body, dict(error.headers or {}))


async def _parameter_error(_: Request, error: Exception) -> Response:
    """Query and path parameters; bodies are parsed by ourselves."""
    assert isinstance(error, RequestValidationError)
    name = str(error.errors()[0]["loc"][-1])
    return error_response(InvalidRequest(f"Invalid value for '{name}'.", param=name))


def _json(status: int, body: dict[str, dict[str, str | None]], headers: dict[str, str]) -> Response:
    return Response(json_bytes(body), status, headers, media_type="application/json")
