"""The pod as an ASGI app: middleware, routes, error bodies, and the life of its services.

In: settings. Out: a FastAPI app, several of which can live in one process (tests do so).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from api_service.error_handlers import add_error_handlers
from api_service.middleware import Authentication, BodyLimit, HeadAsGet, RequestScope, RootPath
from api_service.rate_headers import RATE_HEADERS
from api_service.routes import chat, completions, embeddings, health, metrics, models, streams, tokens
from api_service.routes.described import describe
from api_service.services import Services
from api_service.settings import Settings

__all__ = ["create_app", "metrics_app"]

_PUBLIC = {"/health", "/ready", "/metrics"}
"""Routes that need no key. Everything else does, whether it exists or not."""


_PROBED = _PUBLIC | {"/ping", "/version", "/v1/models", "/load"}
"""Routes that answer HEAD as well."""


def create_app(settings: Settings) -> FastAPI:
    services = Services(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await services.open()
        yield
        await services.close()

    servers = [{"url": settings.root_path}] if settings.root_path else None
    app = FastAPI(title="Headrace", lifespan=lifespan, servers=servers, docs_url=None, redoc_url=None)
    app.state.services = services
    modules = [chat, completions, embeddings, models, streams, tokens, health]
    if settings.metrics_port is None:
        modules.append(metrics)
    for module in modules:
        app.router.routes.extend(module.router.routes)  # flat, so that `app.routes` shows every route there is
    add_error_handlers(app)
    describe(app, keys=bool(settings.keys()), public=sorted(_PUBLIC))

    def public() -> Sequence[BaseRoute]:
        return [route for route in app.routes if getattr(route, "path", None) in _PUBLIC]

    def probed() -> Sequence[BaseRoute]:
        return [route for route in app.routes if getattr(route, "path", None) in _PROBED]

    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Authentication, keys=settings.keys(), public=public)
    app.add_middleware(HeadAsGet, routes=probed)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-ignored-params", "retry-after", *RATE_HEADERS],
        )
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path, routes=lambda: app.routes)
    app.add_middleware(RequestScope, draining=lambda: services.draining)
    return app


def metrics_app(services: Services) -> FastAPI:
    """/metrics alone, for a port of its own."""
    app = FastAPI(title="Headrace metrics", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    app.router.routes.extend(metrics.router.routes)
    app.add_middleware(HeadAsGet, routes=lambda: app.routes)
    add_error_handlers(app)
    return app
