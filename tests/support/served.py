"""Models as a pod sees them, built from toy tokenizers without Redis."""

from __future__ import annotations

from typing import Any

from api_service.prepare.model import ServedModel, Vocabulary
from shared.messages import ModelCard
from tests.support.scripted_worker import TEMPLATE, model_card, tokenizer_json

__all__ = ["served"]

_VOCABULARY = Vocabulary(tokenizer_json())


def served(template: str = TEMPLATE, **changes: Any) -> ServedModel:
    """A model with a byte-level tokenizer of 421 ids and a window of 256; `changes` are fields of its card."""
    card: ModelCard = model_card(template=template, **changes)
    return ServedModel(card, _VOCABULARY, template)
