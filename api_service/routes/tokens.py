"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them: what a prompt or a chat comes to, and back.

No worker is asked. A body without a model means the only one that is served.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from api_service.body import check_content_type, parse_json
from api_service.prepare.chat import ChatOptions, prepare_chat
from api_service.prepare.completion import plain_tokens
from api_service.prepare.model import ServedModel
from api_service.prepare.sampling import check_token_ids
from api_service.routes.described import body_of, refusals
from api_service.routes.generate import name_ignored, services_of
from api_service.schemas.reports import Detokenized, LoadReport, Tokenized, TokenizerInfo
from api_service.schemas.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from api_service.services import Services
from api_service.sse import json_bytes
from shared.errors import InvalidRequest, ModelNotFound, RedisUnavailable, UnsupportedMediaType

__all__ = ["router"]

router = APIRouter(tags=["tokens"])
_ERRORS = (InvalidRequest, ModelNotFound, RedisUnavailable)


@router.post(
    "/tokenize",
    openapi_extra=body_of(TokenizeRequest, TokenizeChatRequest),
    responses={200: {"model": Tokenized}, **refusals(*_ERRORS, UnsupportedMediaType)},
)
async def tokenize(request: Request) -> Response:
    """Token ids of a `prompt`, or of the chat that `messages` are rendered to."""
    services, data = services_of(request), await _body(request)
    with ExitStack() as stack:
        stack.callback(services.admission.admit().release)
        body: TokenizeChatRequest | TokenizeRequest
        if _has_messages(data):
            body = await services.in_thread(parse_json, data, TokenizeChatRequest)
        else:
            body = await services.in_thread(parse_json, data, TokenizeRequest)
        model = await _served(services, body.model)
        ids = await services.in_thread(_ids, body, model, services.chat_options)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.window, "tokens": ids}
    strings = [model.vocabulary.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    return name_ignored(_json(answer | {"token_strs": strings}), body)


@router.post(
    "/detokenize",
    openapi_extra=body_of(DetokenizeRequest),
    responses={200: {"model": Detokenized}, **refusals(*_ERRORS, UnsupportedMediaType)},
)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    services, data = services_of(request), await _body(request)
    with ExitStack() as stack:
        stack.callback(services.admission.admit().release)
        body = await services.in_thread(parse_json, data, DetokenizeRequest)
        model = await _served(services, body.model)
        check_token_ids(body.tokens, model, "tokens")
        text = b"".join(map(model.vocabulary.token_bytes.bytes_of, body.tokens)).decode(errors="replace")
    return name_ignored(_json({"prompt": text}), body)


@router.get("/tokenizer_info", responses={200: {"model": TokenizerInfo}, **refusals(*_ERRORS)})
async def tokenizer_info(request: Request, model: str = "") -> Response:
    """Special tokens and chat template of `model`, which may be left out where only one is served."""
    served = await _served(services_of(request), model)
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": served.window,
        "chat_template": served.template or None,
    }
    return _json({**served.card.special_tokens, **facts})


@router.get("/load", responses={200: {"model": LoadReport}, **refusals()})
async def load(request: Request) -> Response:
    """Requests that this pod carries now."""
    services: Services = services_of(request)
    return _json({"server_load": services.admission.active})


async def _served(services: Services, name: str) -> ServedModel:
    """The model of this name; of no name, the only one. Raises InvalidRequest where that is not clear."""
    registry = services.registry
    if not name:
        if len(registry.snapshot.models) != 1:
            await registry.refresh()
        names = sorted(registry.snapshot.models)
        if not names and not registry.snapshot.redis_ok:
            raise registry.unknown(name)
        if len(names) != 1:
            listed = ", ".join(f"'{known}'" for known in names[:20]) or "none"
            raise InvalidRequest(f"Name the 'model'. Served models: {listed}.", param="model")
        [name] = names
    return await registry.served(name)


async def _body(request: Request) -> bytes:
    check_content_type(request)
    return await request.body()


def _has_messages(data: bytes) -> bool:
    """Which of the two forms it is; whether it is valid is parse_json's to say."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(body, dict) and "messages" in body


def _ids(body: TokenizeChatRequest | TokenizeRequest, model: ServedModel, options: ChatOptions) -> list[int]:
    if isinstance(body, TokenizeChatRequest):
        return list(prepare_chat(body, model, options).prompts[0])
    return plain_tokens(body.prompt, model, "prompt", add_special_tokens=body.add_special_tokens, cut=True)


def _json(value: dict[str, Any]) -> Response:
    return Response(json_bytes(value), media_type="application/json")
