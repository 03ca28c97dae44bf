"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from api_service.prepare.chat import prepare_chat
from api_service.routes.generate import body_schema, generate, services_of
from api_service.schemas.chat import ChatCompletionRequest

__all__ = ["router"]

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """The model's next message, whole or as server-sent events."""
    prepare = partial(prepare_chat, options=services_of(request).chat_options)
    return await generate(request, ChatCompletionRequest, prepare)
