"""An embedding body -> one GenerateRequest for all its inputs, which draws no token. Pure and blocking."""

from __future__ import annotations

from api_service.prepare.completion import plain_tokens
from api_service.prepare.extensions import truncated
from api_service.prepare.limits import answer_limit
from api_service.prepare.model import ServedModel
from api_service.schemas.embedding import EmbeddingRequest
from shared.errors import InvalidRequest
from shared.messages import GenerateRequest
from shared.params import SamplingParams, StopConditions

__all__ = ["prepare_embedding"]


def prepare_embedding(body: EmbeddingRequest, model: ServedModel) -> GenerateRequest:
    """The request without id, tenant and times, which the route adds. Raises InvalidRequest and its kind."""
    body.check_truncation()
    if body.dimensions is not None and body.dimensions != model.card.hidden_size:
        raise InvalidRequest(
            f"'dimensions' must be {model.card.hidden_size}, the model's own: its vectors cannot be shortened.",
            param="dimensions",
        )
    prompts = []
    for i, text in enumerate(body.input):
        path = f"input[{i}]" if len(body.input) > 1 else "input"
        cut = body.truncate_prompt_tokens is not None
        ids = plain_tokens(text, model, path, add_special_tokens=body.add_special_tokens, cut=cut)
        ids = truncated(body, ids, model, 0)
        answer_limit(model, len(ids), 0, default=None, param=path, asked_param=path)
        prompts.append(tuple(ids))
    return GenerateRequest(
        rid="",
        model=model.card.name,
        prompts=tuple(prompts),
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(max_tokens=0),
        kind="embedding",
        tokenizer=model.card.tokenizer,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        pooling=body.pooling or "last",
    )
