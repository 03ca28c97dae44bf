"""Probes: alive (/health, /ping), ready (/ready), and /version. They read memory only: no Redis, no lock, no engine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request, Response

from api_service.routes.described import refusals
from api_service.routes.generate import services_of
from api_service.schemas.reports import Readiness, Status, Version
from api_service.services import Services
from api_service.sse import json_bytes

__all__ = ["router"]

router = APIRouter(tags=["probes"])

try:
    _VERSION = version("headrace")
except PackageNotFoundError:  # run from a checkout
    _VERSION = "0+unknown"


@router.get("/health", responses={200: {"model": Status}, **refusals()})
async def health() -> Response:
    """200 as long as this process answers."""
    return _json(200, {"status": "ok"})


@router.get(
    "/ready",
    responses={200: {"model": Readiness}, 503: {"model": Readiness, "description": "Not ready."}, **refusals()},
)
async def ready(request: Request) -> Response:
    """200 when a request sent now would be worked on, else 503 with the reason. Shows the age of workers' last step."""
    services = services_of(request)
    reason = _not_ready(services)
    workers = [
        {"id": card.worker_id, "model": card.model, "state": card.state, "last_step_age_ms": card.last_step_age_ms}
        for card in services.registry.snapshot.workers
    ]
    return _json(
        503 if reason else 200, {"status": "not ready" if reason else "ready", "reason": reason, "workers": workers}
    )


@router.get("/ping", responses={200: {"model": Status}, **refusals()})
async def ping() -> Response:
    return _json(200, {"status": "ok"})


@router.get("/version", responses={200: {"model": Version}, **refusals()})
async def show_version() -> Response:
    return _json(200, {"version": _VERSION})


def _not_ready(services: Services) -> str | None:
    view = services.registry.snapshot
    if services.draining:
        return "this pod is shutting down"
    if services.reachability.away or not view.redis_ok:
        return "redis cannot be reached"
    serving = view.serving()
    if not serving:
        return "no worker is ready" if not view.workers else "no worker is ready and stepping"
    return None if any(card.model in view.models for card in serving) else "no model is registered"


def _json(status: int, value: dict[str, Any]) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")
