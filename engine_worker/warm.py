"""An engine that is ready to serve, with all that a worker tells pods about its model. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine_worker.interface import ServingEngine
from shared.grammars.compiler import GrammarCompiler
from shared.messages import ModelCard
from shared.text.token_bytes import TokenBytes

__all__ = ["WarmEngine"]


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """Made by a loader: `loading` (a model) or `simulate.loading` (made-up tokens)."""

    engine: ServingEngine
    card: ModelCard
    tokenizer_json: bytes
    token_bytes: TokenBytes
    """Read from `tokenizer_json`, which takes a while."""
    chat_template: str
    """Jinja source, "" when the model has none."""
    grammars: GrammarCompiler | None
    """None: no structured output."""
    kv_cache_bytes: int = 0
    """Memory of the KV cache, reserved as long as the engine lives; 0: made-up tokens need none."""
