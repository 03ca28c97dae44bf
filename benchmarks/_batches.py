"""The batches whose steps are timed, and their layouts."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.layout import BatchLayout
from tests.support.paged import Row, make_layout

__all__ = ["BATCHES", "BLOCK_SIZE", "rows_in_order"]

BLOCK_SIZE = 16
BATCHES: dict[str, list[tuple[int, int]]] = {
    "1 decode at 200": [(1, 200)],
    "1 decode at 4000": [(1, 4000)],
    "8 decodes at 400": [(1, 400)] * 8,
    "32 decodes at 400": [(1, 400)] * 32,
    "64 decodes at 400": [(1, 400)] * 64,
    "prefill 512": [(512, 512)],
    "prefill 512 at 4000": [(512, 4000)],
    "32 decodes + prefill 256": [(1, 400)] * 32 + [(256, 1024)],
}
"""Rows of (new tokens, length)."""


def rows_in_order(lengths: Sequence[tuple[int, int]]) -> tuple[BatchLayout, int]:
    """Rows of (new tokens, length) with blocks in order -> layout, blocks needed."""
    rows, first = [], 0
    for new, length in lengths:
        count = -(-length // BLOCK_SIZE)
        rows.append(Row(length - new, new, range(first, first + count)))
        first += count
    return make_layout(rows, BLOCK_SIZE), first
