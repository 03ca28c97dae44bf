"""What the engine sees of a model: a forward pass over a paged cache, logits, and what came along with the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.models.config import ModelConfig
from kernels.ops import BatchLayout, KVCache, ModelOutput, Ops

__all__ = ["LoadedModel", "Model"]


class Model(Protocol):
    """A decoder-only model. Owned by the engine thread; holds no state between calls but its weights."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty cache of this model's shape, dtype and device."""

    def forward(
        self,
        token_ids: Tensor,
        layout: BatchLayout,
        kv_cache: KVCache,
        sample_at: Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> ModelOutput:
        """token_ids int64 [T] -> hidden states of all, the largest logit of the tokens at sample_at int64 [R] (None: of
        all) and, for those at the ascending positions `wanted` of it (None: all), all logits; writes the tokens' keys
        and values to `kv_cache`. The output holds until the next call."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> float32 [R, V], for tokens whose logits `forward` was not asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to serve, with all that a pod needs to know of it."""

    model: Model
    ops: Ops
    """The op table that the model runs on, for what comes after it."""
    config: ModelConfig
    tokenizer_json: bytes
    """A complete tokenizer.json; its post-processor adds BOS on encode(add_special_tokens=True) where `add_bos`."""
    chat_template: str
    """Jinja source, "" when the model has none."""
    special_tokens: dict[str, str]
    """bos_token, eos_token, pad_token, unk_token as far as the model names them."""
    add_bos: bool
    """Whether a plain completion prompt gets the BOS token in front."""
    eos_token_ids: tuple[int, ...]
    """Ascending; empty when the model names none."""
    defaults: dict[str, float]
    """generation_config's sampling defaults: temperature, top_p, top_k, min_p, repetition_penalty."""
    name: str
    """Default served name: hub id, directory name, or the GGUF file's stem."""
    kernels: str
    """The op table that serves it: native-avx512, onednn, reference, …; `ops.note` says why it is no better one."""
    quantization: str
    """Formats of the quantized weights, e.g. "q4_1, q8_0"; "none", and why where something else was to be expected."""
    weight_bytes: int
    """Memory of all weights."""
    fingerprint: str
    """16 hex digits over the weights' identity (names, shapes, types, sampled bytes), dtype and quantization: equal on
    every worker."""
