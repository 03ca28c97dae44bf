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
from api_service.middleware import Authentication, BodyLimit, RequestScope
from api_service.routes import chat, completions, health, metrics, models, streams
from api_service.services import Services
from api_service.settings import Settings

__all__ = ["create_app"]

_PUBLIC = {"/health", "/ready", "/metrics"}
"""Routes that need no key. Everything else does, whether it exists or not."""


def create_app(settings: Settings) -> FastAPI:
    services = Services(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await services.open()
        yield
        await services.close()

    app = FastAPI(title="Headrace", lifespan=lifespan, root_path=settings.root_path, docs_url=None, redoc_url=None)
    app.state.services = services
    for module in (chat, completions, models, streams, metrics, health):
        app.include_router(module.router)
    app.include_router(health.probes)
    add_error_handlers(app)

    def public() -> Sequence[BaseRoute]:
        return [route for route in app.routes if getattr(route, "path", None) in _PUBLIC]

    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Authentication, keys=settings.keys(), public=public)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestScope, draining=lambda: services.draining)
    return app
