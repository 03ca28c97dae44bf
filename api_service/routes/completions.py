"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api_service.prepare.completion import prepare_completion
from api_service.routes.generate import body_schema, generate
from api_service.schemas.completion import CompletionRequest

__all__ = ["router"]

router = APIRouter(tags=["completions"])


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """The model's continuation of every prompt, whole or as server-sent events."""
    return await generate(request, CompletionRequest, prepare_completion)
