"""What rows draw their next token by, and how a token is found by its weight. All backends follow the same steps.

A token's weight is exp((logit - peak) / temperature), so the best one's is 1. Filters set weights to 0. Then the
token is found in four steps, each with a random number of its own: which `FAN` chunks, which of them, which part of
it, which token. One number alone would have to fall between the same two of the whole vocabulary's running sums, and
where another batch rounds its logits otherwise, one float32 draw in a thousand would not. Sums of a few parts have
few places at which that can happen.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["CHUNK", "FAN", "LEVELS", "Draws", "padded"]

FAN = 16
CHUNK = FAN * FAN
"""Weights are padded to multiples of this."""
LEVELS = 4
"""Random numbers that a draw takes."""


class Draws(NamedTuple):
    """One entry a row, contiguous."""

    temperature: NDArray[np.float32]
    """Above 0."""
    top_k: NDArray[np.int64]
    """Only so many best tokens stay; 0 or the whole vocabulary: all."""
    top_p: NDArray[np.float64]
    """Of those, only the fewest best ones that have this share of their weight stay; 1: all."""
    min_p: NDArray[np.float64]
    """Only tokens stay that weigh as much; 0: all."""
    unit: NDArray[np.float64]
    """[R, LEVELS] random numbers of [0, 1)."""

    def limit(self, row: int, vocab_size: int) -> int:
        """top_k of a row, 0 where it leaves everything."""
        top_k = int(self.top_k[row])
        return top_k if 0 < top_k < vocab_size else 0


def padded(vocab_size: int) -> int:
    """Weights of a row, those of no token included."""
    return -(-vocab_size // CHUNK) * CHUNK
