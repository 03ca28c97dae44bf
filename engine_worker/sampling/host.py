"""Drawing on a CPU: the passes over the vocabulary are torch's, what is left of them is numpy's.

Rows with filters are cut down to a few hundred candidates first: nothing of the vocabulary's length is ever sorted.
Small arrays never go through torch, whose thread pool may wait for a core that other programs have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.params import SamplingParams

__all__ = ["CHUNK", "argmax", "draw"]

CHUNK = 256
"""Weights are padded to multiples of this."""
_SAFE = 0.99
"""Sums of single-precision numbers are a little off: a bound that much lower holds all the same."""

Floats = NDArray[np.float32]


def argmax(logits: Tensor) -> NDArray[np.int64]:
    """logits float32 [R, V] on the host -> first place of each row's largest; a row with NaN gives that."""
    best: NDArray[np.int64] = logits.numpy().argmax(-1)
    return best


def draw(weights: Tensor, params: Sequence[SamplingParams], vocab_size: int, unit: NDArray[np.float64]) -> list[int]:
    """weights float32 [R, W], best token's 1, zeros from `vocab_size` on; unit [R] in [0, 1) -> a token per row."""
    chunks = weights.view(len(params), -1, CHUNK)
    sums = chunks.sum(-1).numpy().astype(np.float64)
    limits = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    # The k-th largest of the chunks' maxima is a lower bound of the k-th largest weight.
    peaks = chunks.amax(-1).numpy() if any(limits) else None
    rows: Floats = weights.numpy()
    tokens = []
    for i, (one, limit) in enumerate(zip(params, limits, strict=True)):
        if not limit and one.top_p >= 1.0 and one.min_p <= 0.0:
            tokens.append(_invert(rows[i], sums[i], unit[i]))
            continue
        total = float(sums[i].sum())
        if limit:
            assert peaks is not None
            least = _rank_bound(rows[i, :vocab_size], peaks[i], limit)
        else:
            # All tokens below it together have less than what top_p cuts off.
            least = _SAFE * (1.0 - one.top_p) * total / vocab_size if one.top_p < 1.0 else one.min_p
        tokens.append(_draw_filtered(rows[i, :vocab_size], one, limit, least, total, unit[i]))
    return tokens


def _rank_bound(row: Floats, peaks: Floats, limit: int) -> float:
    """At least `limit` weights of the row are this large."""
    if limit <= len(peaks):
        return float(np.partition(peaks, len(peaks) - limit)[len(peaks) - limit])
    return float(np.partition(row, len(row) - limit)[len(row) - limit])


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


def _invert(row: Floats, sums: NDArray[np.float64], unit: np.float64) -> int:
    """First token at which the running sum of weights exceeds `unit` of the total; never one of weight zero.

    Two levels: running sums of chunks find the chunk, the chunk's own running sum finds the token.
    """
    outer = sums.cumsum()
    target = unit * outer[-1]
    chunk = _first_above(outer, target)
    inside = row[chunk * CHUNK : (chunk + 1) * CHUNK].cumsum(dtype=np.float64)
    return chunk * CHUNK + _first_above(inside, target - (outer[chunk - 1] if chunk else 0.0))


def _first_above(running: NDArray[np.float64], target: np.float64) -> int:
    """Index of the first running sum above the target, but never past the one that reaches the total."""
    last = int(np.searchsorted(running, running[-1], side="left"))
    return min(int(np.searchsorted(running, target, side="right")), last)
