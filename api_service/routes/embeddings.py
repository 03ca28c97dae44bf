"""POST /v1/embeddings: the served model's hidden states, through the same queue as everything else."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api_service.embeddings import EmbeddingAnswer
from api_service.logprobs import Speller
from api_service.prepare.embedding import prepare_embedding
from api_service.routes.described import GENERATION_ERRORS, QUEUE_HEADERS, body_of, refusals
from api_service.routes.generate import generate
from api_service.schemas.embedding import EmbeddingRequest
from api_service.schemas.reports import EmbeddingList
from shared.messages import GenerateRequest

__all__ = ["router"]

router = APIRouter(tags=["embeddings"])


@router.post(
    "/v1/embeddings",
    openapi_extra=body_of(EmbeddingRequest, headers=QUEUE_HEADERS),
    responses={200: {"model": EmbeddingList}, **refusals(*GENERATION_ERRORS)},
)
async def create_embeddings(request: Request) -> Response:
    """One vector of unit length for every input."""
    return await generate(request, EmbeddingRequest, prepare_embedding, _answer)


def _answer(body: EmbeddingRequest, request: GenerateRequest, _: Speller | None) -> EmbeddingAnswer:
    return EmbeddingAnswer(request, as_base64=body.encoding_format == "base64")
