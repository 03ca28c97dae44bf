"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api_service.prepare.completion import prepare_completion
from api_service.routes.described import GENERATION_ERRORS, QUEUE_HEADERS, body_of, refusals, stream_of
from api_service.routes.generate import generate
from api_service.schemas.answers import TextCompletion, TextCompletionChunk
from api_service.schemas.completion import CompletionRequest

__all__ = ["router"]

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/completions",
    openapi_extra=body_of(CompletionRequest, headers=QUEUE_HEADERS),
    responses={
        200: {"model": TextCompletion, "content": stream_of(TextCompletionChunk)},
        **refusals(*GENERATION_ERRORS),
    },
)
async def create_completion(request: Request) -> Response:
    """The model's continuation of every prompt, whole or as server-sent events."""
    return await generate(request, CompletionRequest, prepare_completion)
