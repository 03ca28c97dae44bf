"""GET /v1/models and /v1/models/{id}: what workers have registered in Redis. Ids may contain slashes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from api_service.routes.described import refusals
from api_service.routes.generate import services_of
from api_service.schemas.reports import ModelEntry, ModelList
from api_service.sse import json_bytes
from shared.errors import ModelNotFound, RedisUnavailable
from shared.messages import ModelCard

__all__ = ["router"]

router = APIRouter(tags=["models"])


@router.get("/v1/models", responses={200: {"model": ModelList}, **refusals(RedisUnavailable)})
async def list_models(request: Request) -> Response:
    """Every model that has a worker."""
    cards = await _cards(request)
    return _json({"object": "list", "data": [_entry(cards[name]) for name in sorted(cards)]})


@router.get(
    "/v1/models/{model_id:path}",
    responses={200: {"model": ModelEntry}, **refusals(ModelNotFound, RedisUnavailable)},
)
async def retrieve_model(request: Request, model_id: str) -> Response:
    card = (await _cards(request)).get(model_id)
    if card is None:
        raise services_of(request).registry.unknown(model_id)
    return _json(_entry(card))


async def _cards(request: Request) -> dict[str, ModelCard]:
    registry = services_of(request).registry
    await registry.refresh()
    if not registry.snapshot.redis_ok:
        raise RedisUnavailable("The registry cannot be reached at the moment. Try again.", retry_after=1.0)
    return registry.snapshot.models


def _entry(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "headrace",
        "root": card.name,
        "parent": None,
        "max_model_len": card.window,
        "generation_defaults": card.defaults,
    }


def _json(value: dict[str, Any]) -> Response:
    return Response(json_bytes(value), media_type="application/json")
