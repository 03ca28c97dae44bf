"""GET /metrics, in Prometheus' text format. Answered without a key: scrapers have none, and it holds no user data."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api_service.metrics import CONTENT_TYPE
from api_service.routes.described import refusals
from api_service.routes.generate import services_of

__all__ = ["router"]

router = APIRouter(tags=["probes"])
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "All metrics.", "content": _TEXT}, **refusals()},
)
async def show_metrics(request: Request) -> Response:
    services = services_of(request)
    services.metrics.active(services.admission.active)
    return Response(services.metrics.text(), media_type=CONTENT_TYPE)
