"""Turns the rows of a plan into the tensors of a forward pass: a handful of numpy calls, whatever the number of rows.

Owns the buffers they live in; a step's tensors are overwritten by the next one's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.plan import ScheduledRequest
from engine_worker.runner.block_tables import BlockTables
from kernels.ops import BatchLayout

__all__ = ["InputBatch", "ModelInput"]

_MAX_VIEWS = 4096


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What one forward pass reads."""

    token_ids: Tensor
    """int64 [T]."""
    layout: BatchLayout
    sample_at: Tensor | None
    """int64 [R], the tokens whose logits are drawn from; None: every token's, in order."""


class _Buffer:
    """Host memory as numpy and torch see it. Views are made once: each costs a trip through torch, and every trip gives
    the interpreter away to threads that may keep it for a millisecond."""

    def __init__(self, size: int, dtype: type[np.int32 | np.int64]) -> None:
        self._whole = np.zeros(size, dtype=dtype)
        self._views: dict[tuple[int, ...], tuple[NDArray[Any], Tensor]] = {}

    def first(self, *shape: int) -> tuple[NDArray[Any], Tensor]:
        """The same memory twice, of this shape."""
        views = self._views.get(shape)
        if views is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            array = self._whole[: math.prod(shape)].reshape(shape)
            views = self._views[shape] = (array, torch.from_numpy(array))
        return views


class InputBatch:
    """Buffers for at most `max_tokens` tokens in `max_rows` rows of at most `max_seq_len` positions."""

    def __init__(self, max_rows: int, max_tokens: int, max_seq_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        width = -(-max_seq_len // block_size)
        self._lines = BlockTables(max_rows, width)
        self._counting = np.arange(max(max_tokens, max_rows), dtype=np.int64)
        self._query_start = _Buffer(max_rows + 1, np.int32)
        self._seq_lens = _Buffer(max_rows, np.int32)
        self._tables = _Buffer(max_rows * width, np.int32)
        self._token_ids = _Buffer(max_tokens, np.int64)
        self._positions = _Buffer(max_tokens, np.int64)
        self._slots = _Buffer(max_tokens, np.int64)
        self._sample_at = _Buffer(max_rows, np.int64)

    def build(self, rows: Sequence[ScheduledRequest]) -> ModelInput:
        """Tensors of one step, row after row; valid until the next call."""
        num_rows = len(rows)
        counts = np.array([row.num_new_tokens for row in rows])
        starts = np.array([row.start for row in rows])
        query_start, query_start_tensor = self._query_start.first(num_rows + 1)
        np.cumsum(counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        seq_lens, seq_lens_tensor = self._seq_lens.first(num_rows)
        np.add(starts, counts, out=seq_lens, casting="same_kind")
        max_seq_len = int(seq_lens.max())

        positions, positions_tensor = self._positions.first(num_tokens)
        row_of = self._counting[:num_rows]
        if num_tokens == num_rows:
            positions[:] = starts
        else:
            row_of = np.repeat(row_of, counts)
            np.add(self._counting[:num_tokens], (starts - query_start[:-1])[row_of], out=positions)
        tables, tables_tensor = self._tables.first(num_rows, -(-max_seq_len // self._block_size))
        tables[:] = self._lines.array[self._lines.lines(rows), : tables.shape[1]]
        slots, slots_tensor = self._slots.first(num_tokens)
        block, offset = np.divmod(positions, self._block_size)
        np.multiply(tables[row_of, block], self._block_size, out=slots)
        slots += offset
        token_ids, token_ids_tensor = self._token_ids.first(num_tokens)
        token_ids[:] = [token for row in rows for token in _new_tokens(row)]

        layout = BatchLayout(
            query_start=self._on_device(query_start_tensor),
            seq_lens=self._on_device(seq_lens_tensor),
            block_tables=self._on_device(tables_tensor),
            slot_mapping=self._on_device(slots_tensor),
            positions=self._on_device(positions_tensor),
            num_tokens=num_tokens,
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
        )
        return ModelInput(self._on_device(token_ids_tensor), layout, self._places(rows, query_start, num_tokens))

    def _places(self, rows: Sequence[ScheduledRequest], query_start: NDArray[np.int32], total: int) -> Tensor | None:
        if total == len(rows) and all(row.samples for row in rows):
            return None
        last = [int(end) - 1 for row, end in zip(rows, query_start[1:].tolist(), strict=True) if row.samples]
        places, tensor = self._sample_at.first(len(last))
        places[:] = last
        return self._on_device(tensor)

    def _on_device(self, tensor: Tensor) -> Tensor:
        # Shares memory on a CPU, copies to any other device.
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _new_tokens(row: ScheduledRequest) -> Sequence[int]:
    """Known tokens start … start + num_new_tokens - 1 of prompt + output."""
    num_prompt = len(row.prompt_token_ids)
    if row.start >= num_prompt:
        first = row.start - num_prompt
        return row.output_token_ids[first : first + row.num_new_tokens]
    end = row.start + row.num_new_tokens
    chunk = row.prompt_token_ids[row.start : end]
    return chunk + row.output_token_ids[: end - num_prompt] if end > num_prompt else chunk
