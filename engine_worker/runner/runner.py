"""Runs the model over one batch. In: rows of a plan. Out: logits of the rows that sample. Touches no `Request`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_worker.config import EngineConfig
from engine_worker.models.base import Model
from engine_worker.plan import ScheduledRequest
from engine_worker.runner.input_batch import InputBatch

__all__ = ["Runner"]


class Runner:
    """Owns the KV cache's memory and the input buffers. `max_request_tokens` bounds the positions of any row."""

    def __init__(self, model: Model, config: EngineConfig, num_blocks: int, max_request_tokens: int) -> None:
        self._model = model
        self.kv_cache = model.new_kv_cache(num_blocks, config.block_size)
        self._inputs = InputBatch(
            config.max_running, config.max_num_batched_tokens, max_request_tokens, config.block_size, model.device
        )

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRequest]) -> Tensor | None:
        """Computes the rows' new tokens and writes their keys and values to the cache.

        Returns logits float32 [R, V] of the R rows that sample, in order; None when none does. Running the same rows
        again gives the same result: nothing but cache slots of these very tokens is written.
        """
        inputs = self._inputs.build(rows)
        hidden = self._model.forward(inputs.token_ids, inputs.layout, self.kv_cache)
        if inputs.sample_at is None:
            return self._model.compute_logits(hidden)
        if not len(inputs.sample_at):
            return None
        return self._model.compute_logits(hidden.index_select(0, inputs.sample_at))
