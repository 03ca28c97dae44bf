"""What a connection beyond the limit gets: answers to probes, because a crowded pod is not a dead one, and 503."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from api_service.error_handlers import error_response
from shared.errors import Overloaded

__all__ = ["refusing"]

_PROBES = {"/health", "/ready", "/metrics"}


def refusing(app: ASGIApp, refused: Callable[[str], None]) -> ASGIApp:
    """Answers probes, refuses everything else; `refused` hears the code."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _PROBES:
            await app(scope, receive, send)
            return
        error = Overloaded("This server has too many connections. Try again.", retry_after=1.0)
        refused(error.code)
        response = error_response(error)
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    return answer
