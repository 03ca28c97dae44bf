"""From settings to a simulated engine: a tokenizer, the model's or a built-in one, and nothing of its weights.

In: settings with `simulate`. Out: a WarmEngine like a model's. Imports no torch. Raises LoadError or ValueError.
"""

from __future__ import annotations

import hashlib
import time

import structlog

from engine_worker.errors import LoadError
from engine_worker.models.loading.text_assets import TextAssets
from engine_worker.models.loading.text_source import load_text
from engine_worker.settings import WorkerSettings
from engine_worker.simulate.engine import SimulatedEngine
from engine_worker.simulate.tokens import TokenSource, ordinary_tokens
from engine_worker.simulate.vocabulary import NAME, built_in_text
from engine_worker.warm import WarmEngine
from shared.messages import ModelCard
from shared.registry import blob_id
from shared.simulation import parse_simulation
from shared.text.token_bytes import TokenBytes

__all__ = ["DEFAULT_WINDOW", "load_engine"]

DEFAULT_WINDOW = 4096
"""Prompt + output tokens of one choice, unless max_model_len says otherwise."""

log = structlog.get_logger(__name__)


def load_engine(settings: WorkerSettings) -> WarmEngine:
    """Ready at once."""
    simulation = parse_simulation(settings.simulate)
    name, text = load_text(settings.model) if settings.model else (NAME, built_in_text())
    token_bytes = TokenBytes.from_tokenizer_json(text.tokenizer_json)
    try:
        source = TokenSource(ordinary_tokens(token_bytes), simulation.seed)
    except ValueError as error:
        raise LoadError(f"{name} cannot be simulated: {error}.") from None
    engine = SimulatedEngine(
        simulation,
        source,
        max_running=settings.max_num_seqs,
        max_request_tokens=settings.max_model_len or DEFAULT_WINDOW,
        vocab_size=len(token_bytes.table),
        eos_token_ids=text.eos_token_ids,
    )
    card = _model_card(settings, name, text, engine, len(token_bytes.table), simulation.seed)
    log.warning("simulated engine: every token is made up", model=card.name, simulate=settings.simulate)
    return WarmEngine(engine, card, text.tokenizer_json, token_bytes, text.chat_template, grammars=None)


def _model_card(
    settings: WorkerSettings, name: str, text: TextAssets, engine: SimulatedEngine, vocab_size: int, seed: int
) -> ModelCard:
    tokenizer = blob_id(text.tokenizer_json)
    window = engine.max_request_tokens()
    return ModelCard(
        name=settings.served_model_name or name,
        created=int(time.time()),
        max_model_len=window,
        max_request_tokens=window,
        vocab_size=vocab_size,
        eos_token_ids=text.eos_token_ids,
        tokenizer=tokenizer,
        chat_template=blob_id(text.chat_template.encode()) if text.chat_template else "",
        special_tokens=text.special_tokens,
        add_bos=text.add_bos,
        defaults=text.defaults,
        architecture="simulated",
        dtype="none",
        fingerprint=hashlib.sha256(f"simulated/{seed}/{tokenizer}".encode()).hexdigest()[:16],
    )
