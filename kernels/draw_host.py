"""Drawing on a CPU, with numpy: one thread does it in a millisecond, torch's pool may wait longer than that for a core.

Rows with filters are cut down to a few hundred candidates first: nothing of the vocabulary's length is ever sorted.
A row's numbers go through the same operations whatever the batch: what it draws depends on itself alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.draws import CHUNK, FAN, Draws

__all__ = ["draw", "weigh"]

_SAFE = 0.99
"""Sums of single-precision numbers are a little off: a bound that much lower holds all the same."""

Floats = NDArray[np.float32]


def weigh(logits: Tensor, peak: Tensor, by: Draws, scratch: Tensor) -> Floats:
    """Weights of logits [R, V], in `scratch` [R, W], with zeros to whole chunks."""
    vocab_size = logits.shape[1]
    weights: Floats = scratch.numpy()
    weights[:, vocab_size:] = 0.0
    body = weights[:, :vocab_size]
    np.subtract(logits.numpy(), peak.numpy()[:, None], out=body)
    if np.any(by.temperature != 1.0):
        np.divide(body, by.temperature[:, None], out=body)
    np.exp(body, out=body)
    return weights


def draw(weights: Floats, by: Draws, vocab_size: int) -> list[int]:
    """weights float32 [R, W], best token's 1, zeros from `vocab_size` on -> R tokens.

    Overwrites the weights: what a row's filters rule out becomes 0.
    """
    chunks = weights.reshape(len(weights), -1, CHUNK)
    sums: NDArray[np.float64] = chunks.sum(-1).astype(np.float64)
    for i in range(len(weights)):
        top_p, min_p, limit = float(by.top_p[i]), float(by.min_p[i]), by.limit(i, vocab_size)
        if limit or top_p < 1.0 or min_p > 0.0:
            row = weights[i]
            row *= row >= _threshold(row[:vocab_size], chunks[i], (limit, top_p, min_p), float(sums[i].sum()))
            sums[i] = chunks[i].sum(-1)
    return _invert(weights, sums, by.unit)


def _threshold(row: Floats, chunks: Floats, filters: tuple[int, float, float], total: float) -> np.float32:
    """The least weight that the filters keep: top_k (0 for none), top_p, min_p. The weights sum up to `total`."""
    limit, top_p, threshold = filters
    if limit:
        least = _rank_bound(row, chunks, limit)
    else:
        # All tokens below it together have less than what top_p cuts off.
        least = _SAFE * (1.0 - top_p) * total / len(row) if top_p < 1.0 else threshold
    if limit or top_p < 1.0:
        # Only weights of at least `least` can be kept; the best one always is.
        threshold = max(threshold, _smallest_kept(row[row >= least], limit, top_p, total))
    return np.float32(threshold)


def _rank_bound(row: Floats, chunks: Floats, limit: int) -> float:
    """At least `limit` weights of the row are this large: as many chunks have a maximum that is."""
    of = chunks.max(-1) if limit <= len(chunks) else row
    return float(np.partition(of, len(of) - limit)[len(of) - limit])


def _smallest_kept(values: Floats, limit: int, top_p: float, total: float) -> float:
    """Weight of the last token that is among the `limit` best (0: all, weighing `total`) and in their smallest set of
    probability `top_p`."""
    best = np.sort(values)[::-1][: limit or None]
    mass = best.cumsum(dtype=np.float64)
    # A token is kept while those before it have less than the wanted share: the best one always is.
    wanted = mass - best < top_p * (mass[-1] if limit else total)
    return float(best[max(int(np.count_nonzero(wanted)), 1) - 1])


def _invert(weights: Floats, sums: NDArray[np.float64], unit: NDArray[np.float64]) -> list[int]:
    """Tokens of the rows, never one of weight 0. `sums` [R, W / CHUNK] are those of the chunks."""
    rows = np.arange(len(unit))
    padded = np.zeros((len(unit), -(-sums.shape[1] // FAN) * FAN))
    padded[:, : sums.shape[1]] = sums
    groups = padded.reshape(len(unit), -1, FAN)
    group = _pick(groups.sum(-1), unit[:, 0])
    chunk = group * FAN + _pick(groups[rows, group], unit[:, 1])
    parts = weights.reshape(len(unit), -1, FAN, FAN)[rows, chunk].astype(np.float64)
    part = _pick(parts.sum(-1), unit[:, 2])
    tokens: list[int] = (chunk * CHUNK + part * FAN + _pick(parts[rows, part], unit[:, 3])).tolist()
    return tokens


def _pick(weights: NDArray[np.float64], unit: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first place of each row at which the running sum exceeds `unit` of the total, never past what reaches it."""
    running = weights.cumsum(-1)
    total = running[:, -1:]
    first: NDArray[np.int64] = np.minimum((running <= unit[:, None] * total).sum(-1), (running < total).sum(-1))
    return first
