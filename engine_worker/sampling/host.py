"""Drawing on a CPU, with numpy: one thread does it in a millisecond, torch's pool may wait longer than that for a core.

Rows with filters are cut down to a few hundred candidates first: nothing of the vocabulary's length is ever sorted.
A row's numbers go through the same operations whatever the batch: what it draws depends on itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.params import SamplingParams

__all__ = ["CHUNK", "Drawing", "argmax", "draw"]

CHUNK = 256
"""Weights are padded to multiples of this."""
_SAFE = 0.99
"""Sums of single-precision numbers are a little off: a bound that much lower holds all the same."""

Floats = NDArray[np.float32]


def argmax(logits: Tensor) -> NDArray[np.int64]:
    """logits float32 [R, V] on the host -> first place of each row's largest; a row with NaN gives that."""
    best: NDArray[np.int64] = logits.numpy().argmax(-1)
    return best


class Drawing:
    """Keeps one scratch buffer of [rows, vocabulary], so that a step allocates nothing large."""

    def __init__(self) -> None:
        self._scratch: Floats = np.empty(0, dtype=np.float32)

    def weights(self, logits: Tensor, peak: Tensor, params: Sequence[SamplingParams]) -> Floats:
        """exp((logits - peak) / temperature), the best token's weight being 1, padded with zeros to whole chunks."""
        num_rows, vocab_size = logits.shape
        width = -(-vocab_size // CHUNK) * CHUNK
        if len(self._scratch) < num_rows * width:
            self._scratch = np.empty(num_rows * width, dtype=np.float32)
        weights = self._scratch[: num_rows * width].reshape(num_rows, width)
        weights[:, vocab_size:] = 0.0
        body = weights[:, :vocab_size]
        np.subtract(logits.numpy(), peak.numpy(), out=body)
        if any(p.temperature != 1.0 for p in params):
            np.divide(body, np.array([[p.temperature] for p in params], dtype=np.float32), out=body)
        np.exp(body, out=body)
        return weights


def draw(weights: Floats, params: Sequence[SamplingParams], vocab_size: int, unit: NDArray[np.float64]) -> list[int]:
    """weights float32 [R, W], best token's 1, zeros from `vocab_size` on; unit [R] in [0, 1) -> a token per row."""
    sums: NDArray[np.float64] = weights.reshape(len(params), -1, CHUNK).sum(-1).astype(np.float64)
    limits = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    filtered = [i for i, p in enumerate(params) if limits[i] or p.top_p < 1.0 or p.min_p > 0.0]
    tokens = _invert(weights, sums, unit)
    for i in filtered:
        row, one, total = weights[i, :vocab_size], params[i], float(sums[i].sum())
        if limits[i]:
            least = _rank_bound(row, weights[i].reshape(-1, CHUNK), limits[i])
        else:
            # All tokens below it together have less than what top_p cuts off.
            least = _SAFE * (1.0 - one.top_p) * total / vocab_size if one.top_p < 1.0 else one.min_p
        tokens[i] = _draw_filtered(row, one, limits[i], least, total, unit[i])
    return tokens


def _rank_bound(row: Floats, chunks: Floats, limit: int) -> float:
    """At least `limit` weights of the row are this large: as many chunks have a maximum that is."""
    of = chunks.max(-1) if limit <= len(chunks) else row
    return float(np.partition(of, len(of) - limit)[len(of) - limit])


def _draw_filtered(
    row: Floats, params: SamplingParams, limit: int, least: float, total: float, unit: np.float64
) -> int:
    """Only weights of at least `least` can be kept; the best one always is."""
    places = np.flatnonzero(row >= least)
    values = row[places]
    threshold = params.min_p
    if limit or params.top_p < 1.0:
        threshold = max(threshold, _smallest_kept(values, limit, params.top_p, total))
    kept = values >= threshold
    running = np.where(kept, values, 0.0).cumsum(dtype=np.float64)
    return int(places[_first_above(running, unit * running[-1])])


def _smallest_kept(values: Floats, limit: int, top_p: float, total: float) -> float:
    """Weight of the last token that is among the `limit` best (0: all, weighing `total`) and in their smallest set of
    probability `top_p`."""
    best = np.sort(values)[::-1][: limit or None]
    mass = best.cumsum(dtype=np.float64)
    # A token is kept while those before it have less than the wanted share: the best one always is.
    wanted = mass - best < top_p * (mass[-1] if limit else total)
    return float(best[max(int(np.count_nonzero(wanted)), 1) - 1])


def _invert(weights: Floats, sums: NDArray[np.float64], unit: NDArray[np.float64]) -> list[int]:
    """First token of each row at which the running sum of weights exceeds `unit` of the total, never one of weight 0.

    Two levels: running sums of chunks find the chunk, the chunk's own running sum finds the token.
    """
    rows = np.arange(len(unit))
    outer = sums.cumsum(-1)
    target = unit * outer[:, -1]
    chunk = _first_above_each(outer, target)
    before = np.where(chunk > 0, outer[rows, chunk - 1], 0.0)
    inside = weights.reshape(len(unit), -1, CHUNK)[rows, chunk].cumsum(-1, dtype=np.float64)
    tokens: list[int] = (chunk * CHUNK + _first_above_each(inside, target - before)).tolist()
    return tokens


def _first_above_each(running: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.int64]:
    """As `_first_above`, for each row."""
    above = (running <= target[:, None]).sum(-1)
    last = (running < running[:, -1:]).sum(-1)
    first: NDArray[np.int64] = np.minimum(above, last)
    return first


def _first_above(running: NDArray[np.float64], target: np.float64) -> int:
    """Index of the first running sum above the target, but never past the one that reaches the total."""
    last = int(np.searchsorted(running, running[-1], side="left"))
    return min(int(np.searchsorted(running, target, side="right")), last)
