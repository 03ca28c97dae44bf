"""Draws one token per row from logits: temperature, top-k, top-p, min-p, then a choice by weight, level by level.

All rows at once. Nothing is sorted unless a row asks for top-k or top-p, and then only as many candidates as needed.
Every row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.sampling import host
from engine_worker.sampling.rng import uniform
from shared.params import SamplingParams

__all__ = ["Drawer", "is_greedy"]

_GREEDY_BELOW = 1e-5
_CHUNK, _FAN = host.CHUNK, host.FAN
_FIRST_CANDIDATES = 256


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

    def __init__(self) -> None:
        self._scratch = torch.empty(0)
        self._host = host.Drawing()

    def draw(
        self,
        logits: Tensor,
        peak: Tensor,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
    ) -> list[int]:
        """logits float32 [R, V] (finite or -inf), peak [R, 1] their maxima (finite) -> R token ids."""
        unit = uniform(seeds, positions, host.LEVELS)
        if logits.device.type == "cpu":
            return host.draw(self._host.weights(logits, peak, params), params, logits.shape[1], unit)
        return self._draw_on_device(self._weights(logits, peak, params), params, logits.shape[1], unit)

    def _draw_on_device(
        self, weights: Tensor, params: Sequence[SamplingParams], vocab_size: int, unit: NDArray[np.float64]
    ) -> list[int]:
        """As `host.draw`, in few launches and one copy back."""
        threshold = _threshold(weights[:, :vocab_size], params)
        if threshold is not None:
            weights.masked_fill_(weights < threshold, 0.0)
        drawn: list[int] = _invert(weights, torch.from_numpy(unit).to(weights.device)).tolist()
        return drawn

    def _weights(self, logits: Tensor, peak: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        """exp((logits - peak) / temperature), the best token's weight being 1, padded with zeros to whole chunks."""
        num_rows, vocab_size = logits.shape
        width = -(-vocab_size // _CHUNK) * _CHUNK
        if self._scratch.numel() < num_rows * width or self._scratch.device != logits.device:
            self._scratch = torch.empty(num_rows * width, device=logits.device)
        weights = self._scratch[: num_rows * width].view(num_rows, width)
        weights[:, vocab_size:] = 0.0
        body = weights[:, :vocab_size]
        torch.sub(logits, peak, out=body)
        if any(p.temperature != 1.0 for p in params):
            body.div_(_column([p.temperature for p in params], logits.device))
        body.exp_()
        return weights


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    """float32 [R, 1] by way of numpy: one copy, no inference of types."""
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(device)[:, None]


def _threshold(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """Smallest weight [R, 1] that a row keeps; None when no row filters. Tokens of equal weight stay or go together."""
    vocab_size = weights.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    sorting = [i for i, p in enumerate(params) if limits[i] < vocab_size or p.top_p < 1.0]
    if not sorting and all(p.min_p <= 0.0 for p in params):
        return None
    threshold = _column([p.min_p for p in params], weights.device)
    if sorting:
        rows = weights if len(sorting) == len(params) else weights[sorting]
        kept = _smallest_kept(rows, [limits[i] for i in sorting], [params[i].top_p for i in sorting])
        threshold[sorting] = torch.maximum(threshold[sorting], kept)
    return threshold


def _smallest_kept(weights: Tensor, limits: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Weight [n, 1] of the last token that is among the `limits` best and in their smallest set of probability `top_p`.

    Looks at some hundred best tokens first and at more only while a row's set may reach beyond them.
    """
    vocab_size = weights.shape[1]
    unlimited = any(limit == vocab_size for limit in limits)
    count = min(max([limit for limit in limits if limit < vocab_size] + [_FIRST_CANDIDATES] * unlimited), vocab_size)
    rank_limit = torch.tensor(limits, device=weights.device)[:, None]
    share = torch.tensor(top_p, dtype=torch.float64, device=weights.device)[:, None]
    whole = weights.sum(-1, keepdim=True, dtype=torch.float64) if unlimited else None
    while True:
        best = weights.topk(count).values
        in_rank = torch.arange(count, device=weights.device) < rank_limit
        mass = torch.where(in_rank, best, 0.0).cumsum(-1, dtype=torch.float64)
        total = mass[:, -1:] if whole is None else torch.where(rank_limit < vocab_size, mass[:, -1:], whole)
        # A token is kept while those before it have less than the wanted share: the best one always is.
        wanted = in_rank & (mass - best < share * total)
        if count == vocab_size or not bool((wanted[:, -1:] & (rank_limit > count)).any()):
            return best.gather(-1, wanted.sum(-1, keepdim=True).clamp_(min=1) - 1)
        count = min(count * 8, vocab_size)


def _invert(weights: Tensor, unit: Tensor) -> Tensor:
    """As `host._invert`: weights [R, W], unit [R, LEVELS] -> int64 [R]. Reads the vocabulary once."""
    num_rows = weights.shape[0]
    sums = weights.view(num_rows, -1, _CHUNK).sum(-1).double()
    sums = torch.nn.functional.pad(sums, (0, -sums.shape[1] % _FAN)).view(num_rows, -1, _FAN)
    group = _pick(sums.sum(-1), unit[:, :1])
    chunk = group * _FAN + _pick(_at(sums, group), unit[:, 1:2])
    parts = _at(weights.view(num_rows, -1, _CHUNK), chunk).double().view(num_rows, _FAN, _FAN)
    part = _pick(parts.sum(-1), unit[:, 2:3])
    return (chunk * _CHUNK + part * _FAN + _pick(_at(parts, part), unit[:, 3:4]))[:, 0]


def _at(lines: Tensor, index: Tensor) -> Tensor:
    """lines [R, N, M], index [R, 1] -> [R, M]."""
    return lines.gather(1, index[:, :, None].expand(-1, -1, lines.shape[2]))[:, 0]


def _pick(weights: Tensor, unit: Tensor) -> Tensor:
    """The first place [R, 1] of each row at which the running sum exceeds `unit` [R, 1] of the total."""
    running = weights.cumsum(-1)
    return _first_above(running, unit * running[:, -1:])


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """Index [R, 1] of the first running sum above the target, but never past the one that reaches the total."""
    last = (running < running[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(running, target, right=True), last)
