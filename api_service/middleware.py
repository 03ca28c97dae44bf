"""What every request passes before its route, as pure ASGI (BaseHTTPMiddleware hides disconnects): id, key, body size.

In: ASGI scopes. Out: the same with `state.request_id` and `state.tenant` set, or an answer at once. Deny by default:
without a key only the routes listed as public are reached, and they are recognised by the router itself, never by a
prefix.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Sequence

import structlog
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_service.error_handlers import error_response
from api_service.tenants import ANONYMOUS
from shared.errors import BodyTooLarge, EngineFailure, HeadraceError, InvalidApiKey
from shared.limits import key_id

__all__ = ["ANONYMOUS", "Authentication", "BodyLimit", "HeadAsGet", "RequestScope", "RootPath"]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_DISCARD_LIMIT = 64 * 1024 * 1024
_DISCARD_S = 5.0

log = structlog.get_logger(__name__)


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


class RequestScope:
    """Outermost: `x-request-id` in and out, `Connection: close` while the pod drains, a last net for our own faults."""

    def __init__(self, app: ASGIApp, draining: Callable[[], bool]) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id") or b""
        request_id = given if _REQUEST_ID.fullmatch(given) else b"req_" + secrets.token_hex(16).encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = [*message["headers"], (b"x-request-id", request_id)]
                if self._draining():
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # it left while it was still sending: nobody to answer, nothing was queued
        except Exception:  # an unforeseen fault ends one request, with an id to find it by in the log
            log.exception("a request failed", request_id=request_id.decode(), path=scope["path"])
            if started:
                raise  # the server cuts the connection: no clean end for half an answer
            failure = EngineFailure("The server failed on this request.")
            await error_response(failure)(scope, receive, send_with_id)


class HeadAsGet:
    """Probes ask with HEAD: these routes answer it as GET, and the server leaves the body out."""

    def __init__(self, app: ASGIApp, routes: Callable[[], Sequence[BaseRoute]]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            asked = {**scope, "method": "GET"}  # the server's own scope still says HEAD
            if any(route.matches(asked)[0] is Match.FULL for route in self._routes()):
                scope = asked
        await self._app(scope, receive, send)


class RootPath:
    """Behind a proxy that keeps its prefix: strips it for routing. A path that is a route as it came stays as it is, so
    proxies that strip the prefix themselves work too, whatever the prefix is."""

    def __init__(self, app: ASGIApp, root_path: str, routes: Callable[[], Sequence[BaseRoute]]) -> None:
        self._app = app
        self._root_path = root_path
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefixed = scope["type"] != "lifespan" and scope["path"].startswith(self._root_path + "/")
        if prefixed and all(route.matches(scope)[0] is Match.NONE for route in self._routes()):
            scope["root_path"] = self._root_path
        await self._app(scope, receive, send)


class Authentication:
    """Bearer keys, compared in constant time. A tenant is named by a hash of its key: the key itself goes nowhere."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], public: Callable[[], Sequence[BaseRoute]]) -> None:
        self._app = app
        self._tenants = {hashlib.sha256(key.encode()).digest(): key_id(key) for key in keys}
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        tenant = self._tenant_of(scope) if self._tenants else ANONYMOUS
        if tenant is None and not any(route.matches(scope)[0] is Match.FULL for route in self._public()):
            await _answer(InvalidApiKey("Send a valid API key: 'Authorization: Bearer KEY'."), scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant or ""
        await self._app(scope, receive, send)

    def _tenant_of(self, scope: Scope) -> str | None:
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        for known, tenant in self._tenants.items():  # all of them: the time taken says nothing about which
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if scheme.lower() == b"bearer" else None


class BodyLimit:
    """Refuses bodies over the limit, announced or not; takes in what is on its way so that the client hears it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _header(scope, b"content-length") or b"0"
        if announced.isdigit() and int(announced) > self._max_bytes:
            await _discard(receive)
            await _answer(self._too_large(), scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                await _discard(receive)
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body is larger than {self._max_bytes} bytes.")


async def _discard(receive: Receive) -> None:
    """Reads on without keeping anything: a connection closed with unread bytes is reset before its answer is read."""
    left = _DISCARD_LIMIT
    try:
        async with asyncio.timeout(_DISCARD_S):
            while left > 0:
                message = await receive()
                if not message.get("more_body"):
                    return
                left -= len(message["body"])
    except TimeoutError:
        return


async def _answer(error: HeadraceError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        scope["app"].state.services.metrics.refused(error.code)
        await error_response(error)(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008})
