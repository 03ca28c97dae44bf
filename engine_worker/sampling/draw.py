"""Draws one token per row from logits: temperature, top-k, top-p, min-p, then a choice by weight, on the op table.

All rows at once; every row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine_worker.sampling.rng import uniform
from kernels.ops import LEVELS, Draws, Ops, padded
from shared.params import SamplingParams

__all__ = ["Drawer", "is_greedy"]

_GREEDY_BELOW = 1e-5


def is_greedy(params: SamplingParams, vocab_size: int) -> bool:
    """Whether the parameters leave nothing but the best token (whose probability is at least 1 / vocabulary)."""
    return (
        params.temperature < _GREEDY_BELOW
        or params.top_k == 1
        or params.min_p >= 1.0
        or params.top_p * vocab_size <= 1.0
    )


class Drawer:
    """Keeps one scratch buffer of [rows, vocabulary], so that a step allocates nothing large."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._scratch = torch.empty(0)

    def draw(
        self,
        logits: Tensor,
        peak: Tensor,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
    ) -> list[int]:
        """logits float32 [R, V] (finite or -inf), peak [R] their maxima (finite) -> R token ids."""
        return self._ops.draw(logits, peak, _draws(params, seeds, positions), self._room(logits))

    def _room(self, logits: Tensor) -> Tensor:
        num_rows, width = logits.shape[0], padded(logits.shape[1])
        if self._scratch.numel() < num_rows * width or self._scratch.device != logits.device:
            self._scratch = torch.empty(num_rows * width, device=logits.device)
        return self._scratch[: num_rows * width].view(num_rows, width)


def _draws(params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> Draws:
    return Draws(
        np.array([one.temperature for one in params], dtype=np.float32),
        np.array([one.top_k for one in params], dtype=np.int64),
        np.array([one.top_p for one in params], dtype=np.float64),
        np.array([one.min_p for one in params], dtype=np.float64),
        uniform(seeds, positions, LEVELS),
    )
