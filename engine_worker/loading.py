"""From settings to a warm engine: loads the model, makes the engine, runs one tiny request through it.

Runs in a thread of its own, so that heartbeats go on meanwhile. Raises LoadError (model) or ValueError (settings), both
with a message for the operator.
"""

from __future__ import annotations

import os
import time

import structlog
import torch

from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.logs import LoadingProgress
from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from engine_worker.request import Request
from engine_worker.settings import WorkerSettings
from engine_worker.warm import WarmEngine
from shared.grammars.compiler import GrammarCompiler
from shared.messages import ModelCard
from shared.params import SamplingParams
from shared.registry import blob_id
from shared.text.token_bytes import TokenBytes

__all__ = ["load_engine", "make_engine"]

log = structlog.get_logger(__name__)


def load_engine(settings: WorkerSettings) -> WarmEngine:
    """Blocks for as long as loading takes."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with LoadingProgress(settings.model or "default model") as progress:
        loaded = load(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            max_model_len=settings.max_model_len,
            quantization=settings.quantization,
            kv_cache_dtype=settings.kv_cache_dtype,
            batch_invariant=settings.batch_invariant,
            progress=progress,
        )
    log.info(
        "model loaded",
        model=loaded.name,
        dtype=loaded.config.dtype,
        kv_cache_dtype=str(loaded.config.cache_torch_dtype).removeprefix("torch."),
        batch_invariant=settings.batch_invariant,
        quantization=loaded.quantization,
        weights_mib=loaded.weight_bytes >> 20,
        kernels=loaded.kernels,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        idle_threads=os.environ.get("OMP_WAIT_POLICY", "spin"),
    )
    if loaded.ops.note:
        log.warning(
            "PyTorch's kernels serve, several times slower than Headrace's compiled ones", reason=loaded.ops.note
        )
    return make_engine(settings, loaded)


def make_engine(settings: WorkerSettings, loaded: LoadedModel) -> WarmEngine:
    """A warm engine of a loaded model. Raises ValueError for a tokenizer that cannot be decoded token by token."""
    token_bytes = TokenBytes.from_tokenizer_json(loaded.tokenizer_json)
    engine = Engine(
        loaded,
        EngineConfig(
            block_size=settings.block_size,
            kv_cache_memory=settings.kv_cache_memory,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            enable_prefix_caching=settings.enable_prefix_caching,
            target_itl_ms=settings.target_itl_ms,
        ),
    )
    _warm_up(engine)
    card = _model_card(settings, loaded, engine)
    grammars = _grammars(loaded, token_bytes)
    kv_cache_bytes = engine.stats().blocks_total * settings.block_size * loaded.config.kv_bytes_per_token()
    return WarmEngine(
        engine, card, loaded.tokenizer_json, token_bytes, loaded.chat_template, grammars, kv_cache_bytes=kv_cache_bytes
    )


def _grammars(loaded: LoadedModel, token_bytes: TokenBytes) -> GrammarCompiler | None:
    try:
        return GrammarCompiler(loaded.tokenizer_json, token_bytes, loaded.eos_token_ids, loaded.config.vocab_size)
    except ValueError as error:
        log.warning("no structured output", reason=str(error))
        return None


def _warm_up(engine: Engine) -> None:
    """First steps allocate and choose kernels: no client should wait for that, and nobody learns from how long it took.

    Raises RuntimeError when they fail.
    """
    tokens = min(2, engine.max_request_tokens() - 1)
    # Of class batch: after an interactive one batch work is kept short for a while, in case another comes.
    request = Request(
        "warm-up", [0], SamplingParams(temperature=0.0), 0, tokens, stop_token_ids=frozenset(), klass="batch"
    )
    engine.add(request)
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason == "error":
                raise RuntimeError(f"the engine cannot run its first request: {event.error_message}")


def _model_card(settings: WorkerSettings, loaded: LoadedModel, engine: Engine) -> ModelCard:
    config = loaded.config
    return ModelCard(
        name=settings.served_model_name or loaded.name,
        created=int(time.time()),
        max_model_len=min(config.max_model_len, settings.max_model_len or config.max_model_len),
        max_request_tokens=engine.max_request_tokens(),
        vocab_size=config.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=blob_id(loaded.tokenizer_json),
        chat_template=blob_id(loaded.chat_template.encode()) if loaded.chat_template else "",
        special_tokens=loaded.special_tokens,
        add_bos=loaded.add_bos,
        defaults=loaded.defaults,
        architecture=config.architecture,
        dtype=config.dtype,
        fingerprint=loaded.fingerprint,
        hidden_size=config.hidden_size,
    )
