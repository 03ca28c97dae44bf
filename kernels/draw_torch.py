"""Drawing in plain torch, for any device: all rows at once, in few launches and one copy back.

Nothing is sorted unless a row asks for top-k or top-p, and then only as many candidates as needed. Every row's result
depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.draws import CHUNK, FAN, Draws

__all__ = ["draw", "threshold", "weigh"]

_FIRST_CANDIDATES = 256


def weigh(logits: Tensor, peak: Tensor, by: Draws, scratch: Tensor) -> Tensor:
    """Weights of logits [R, V], in `scratch` [R, W], with zeros to whole chunks."""
    vocab_size = logits.shape[1]
    scratch[:, vocab_size:] = 0.0
    body = scratch[:, :vocab_size]
    torch.sub(logits, peak[:, None], out=body)
    if np.any(by.temperature != 1.0):
        body.div_(torch.from_numpy(by.temperature).to(logits.device)[:, None])
    body.exp_()
    return scratch


def draw(weights: Tensor, by: Draws, vocab_size: int) -> list[int]:
    """As `draw_host.draw`."""
    least = threshold(weights[:, :vocab_size], by)
    if least is not None:
        weights.masked_fill_(weights < least, 0.0)
    drawn: list[int] = _invert(weights, torch.from_numpy(by.unit).to(weights.device)).tolist()
    return drawn


def threshold(weights: Tensor, by: Draws) -> Tensor | None:
    """Smallest weight [R, 1] that a row keeps; None when no row filters. Tokens of equal weight stay or go together."""
    vocab_size = weights.shape[1]
    limits = [by.limit(i, vocab_size) or vocab_size for i in range(len(weights))]
    sorting = [i for i, limit in enumerate(limits) if limit < vocab_size or by.top_p[i] < 1.0]
    if not sorting and not np.any(by.min_p > 0.0):
        return None
    least = torch.from_numpy(by.min_p.astype(np.float32)).to(weights.device)[:, None]
    if sorting:
        rows = weights if len(sorting) == len(weights) else weights[sorting]
        kept = _smallest_kept(rows, [limits[i] for i in sorting], by.top_p[sorting].tolist())
        least[sorting] = torch.maximum(least[sorting], kept)
    return least


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
    """As `draw_host._invert`: weights [R, W], unit [R, LEVELS] -> int64 [R]. Reads the vocabulary once."""
    num_rows = weights.shape[0]
    sums = weights.view(num_rows, -1, CHUNK).sum(-1).double()
    sums = torch.nn.functional.pad(sums, (0, -sums.shape[1] % FAN)).view(num_rows, -1, FAN)
    group = _pick(sums.sum(-1), unit[:, :1])
    chunk = group * FAN + _pick(_at(sums, group), unit[:, 1:2])
    parts = _at(weights.view(num_rows, -1, CHUNK), chunk).double().view(num_rows, FAN, FAN)
    part = _pick(parts.sum(-1), unit[:, 2:3])
    return (chunk * CHUNK + part * FAN + _pick(_at(parts, part), unit[:, 3:4]))[:, 0]


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
