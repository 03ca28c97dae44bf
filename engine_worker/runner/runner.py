"""Runs the model over one batch. In: rows of a plan. Out: logits of the rows that sample, and what is measured of
prompts. Touches no `Request`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine_worker.config import EngineConfig
from engine_worker.models.base import Model
from engine_worker.plan import ScheduledRequest
from engine_worker.runner.input_batch import InputBatch
from engine_worker.runner.measure import Measured, measure
from kernels.ops import populate

__all__ = ["Runner", "StepOutput"]

_ALL = object()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step's forward pass gave."""

    logits: Tensor
    """float32 [W, V] of the rows whose logits were asked for, in order."""
    best: Tensor
    """int64 [R], of each of the R rows that sample the place of its largest logit; see `ModelOutput`."""
    peaks: Tensor
    """float32 [R], the largest itself."""
    measured: dict[int, Measured]
    """By position of the row in the batch; only rows that ask for it."""


class Runner:
    """Owns the KV cache's memory and the input buffers. `max_request_tokens` bounds the positions of any row."""

    def __init__(self, model: Model, config: EngineConfig, num_blocks: int, max_request_tokens: int) -> None:
        self._model = model
        self.kv_cache = model.new_kv_cache(num_blocks, config.block_size)
        self._promised = populate(self.kv_cache)
        self._inputs = InputBatch(
            config.max_running,
            config.max_num_batched_tokens,
            max_request_tokens,
            config.block_size,
            model.device,
        )

    def get_ready(self) -> bool:
        """Gives another piece of the cache its memory; False: it has all of it."""
        return next(self._promised, _ALL) is not _ALL

    def run(self, rows: Sequence[ScheduledRequest], wanted: Sequence[int] | None = None) -> StepOutput:
        """Computes the rows' new tokens and writes their keys and values to the cache. wanted: which of the rows that
        sample have all of their logits in the output, ascending; None: all of these rows.

        The output holds until the next call. Running the same rows again gives the same result: nothing but cache slots
        of these very tokens is written.
        """
        inputs = self._inputs.build(rows)
        output = self._model.forward(inputs.token_ids, inputs.layout, self.kv_cache, inputs.sample_at, wanted)
        measured = measure(self._model, output.hidden, rows)
        return StepOutput(output.logits, output.best, output.peaks, measured)
