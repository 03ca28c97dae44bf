"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from api_service.prepare.chat import prepare_chat
from api_service.routes.described import GENERATION_ERRORS, QUEUE_HEADERS, body_of, refusals, stream_of
from api_service.routes.generate import generate, services_of
from api_service.schemas.answers import ChatCompletion, ChatCompletionChunk
from api_service.schemas.chat import ChatCompletionRequest

__all__ = ["router"]

router = APIRouter(tags=["chat"])


@router.post(
    "/v1/chat/completions",
    openapi_extra=body_of(ChatCompletionRequest, headers=QUEUE_HEADERS),
    responses={
        200: {"model": ChatCompletion, "content": stream_of(ChatCompletionChunk)},
        **refusals(*GENERATION_ERRORS),
    },
)
async def create_chat_completion(request: Request) -> Response:
    """The model's next message, whole or as server-sent events."""
    prepare = partial(prepare_chat, options=services_of(request).chat_options)
    return await generate(request, ChatCompletionRequest, prepare)
