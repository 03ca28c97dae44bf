"""The block tables of running requests as one persistent array, so that a step copies only what is new.

In: rows of a plan. Out: which line of the array is whose. A request keeps its line from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_worker.plan import ScheduledRequest

__all__ = ["BlockTables"]


@dataclass(slots=True)
class _Line:
    index: int
    source: list[int]
    """The list it was copied from: admission makes a new one, growth appends to it."""
    length: int = 0


class BlockTables:
    """`num_lines` block tables of `width` block ids each; a batch never has more rows than there are lines."""

    def __init__(self, num_lines: int, width: int) -> None:
        self.array: NDArray[np.int32] = np.zeros((num_lines, width), dtype=np.int32)
        self._lines: dict[str, _Line] = {}
        self._free = list(range(num_lines))

    def lines(self, rows: Sequence[ScheduledRequest]) -> NDArray[np.int64]:
        """Line of each row, int64 [B], brought up to date."""
        indices = np.empty(len(rows), dtype=np.int64)
        for i, row in enumerate(rows):
            line = self._lines.get(row.request_id)
            if line is None or line.source is not row.block_table:
                line = self._assign(row, rows)
            length = len(row.block_table)
            if line.length < length:
                self.array[line.index, line.length : length] = row.block_table[line.length :]
                line.length = length
            indices[i] = line.index
        return indices

    def _assign(self, row: ScheduledRequest, batch: Sequence[ScheduledRequest]) -> _Line:
        old = self._lines.pop(row.request_id, None)
        if old is not None:
            self._free.append(old.index)
        elif not self._free:
            # Nobody tells of requests that ended: lines are taken back when they are needed.
            present = {other.request_id for other in batch}
            for gone in [request_id for request_id in self._lines if request_id not in present]:
                self._free.append(self._lines.pop(gone).index)
        line = self._lines[row.request_id] = _Line(self._free.pop(), row.block_table)
        return line
