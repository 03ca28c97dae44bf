"""Turns the rows of a plan into the tensors of a forward pass: a handful of numpy calls, whatever the number of rows.

Owns the buffers they live in; a step's tensors are overwritten by the next one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.plan import ScheduledRequest
from engine_worker.runner.block_tables import BlockTables
from kernels.ops import BatchLayout

__all__ = ["InputBatch", "ModelInput"]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What one forward pass reads."""

    token_ids: Tensor
    """int64 [T]."""
    layout: BatchLayout
    sample_at: Tensor | None
    """int64 [R], the tokens whose logits are drawn from; None: every token's, in order."""


class InputBatch:
    """Buffers for at most `max_tokens` tokens in `max_rows` rows of at most `max_seq_len` positions."""

    def __init__(self, max_rows: int, max_tokens: int, max_seq_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = BlockTables(max_rows, -(-max_seq_len // block_size))
        self._counting = np.arange(max(max_tokens, max_rows), dtype=np.int64)
        self._query_start = np.zeros(max_rows + 1, dtype=np.int32)
        self._token_ids = np.zeros(max_tokens, dtype=np.int64)
        self._positions = np.zeros(max_tokens, dtype=np.int64)
        self._slots = np.zeros(max_tokens, dtype=np.int64)

    def build(self, rows: Sequence[ScheduledRequest]) -> ModelInput:
        """Tensors of one step, row after row; valid until the next call."""
        num_rows = len(rows)
        counts = np.fromiter((row.num_new_tokens for row in rows), np.int64, num_rows)
        starts = np.fromiter((row.start for row in rows), np.int64, num_rows)
        query_start = self._query_start[: num_rows + 1]
        np.cumsum(counts, out=query_start[1:])
        num_tokens, ends = int(query_start[-1]), starts + counts
        max_seq_len = int(ends.max())

        row_of = np.repeat(self._counting[:num_rows], counts)
        positions = self._positions[:num_tokens]
        np.add(self._counting[:num_tokens], (starts - query_start[:-1])[row_of], out=positions)
        tables = self._tables.array[self._tables.lines(rows), : -(-max_seq_len // self._block_size)]
        slots = self._slots[:num_tokens]
        np.multiply(tables[row_of, positions // self._block_size], self._block_size, out=slots)
        slots += positions % self._block_size
        token_ids = self._token_ids[:num_tokens]
        token_ids[:] = [token for row in rows for token in _new_tokens(row)]

        layout = BatchLayout(
            query_start=self._tensor(query_start),
            seq_lens=self._tensor(ends.astype(np.int32)),
            block_tables=self._tensor(tables),
            slot_mapping=self._tensor(slots),
            positions=self._tensor(positions),
            num_tokens=num_tokens,
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
        )
        return ModelInput(self._tensor(token_ids), layout, self._sample_at(rows, query_start, num_tokens))

    def _sample_at(self, rows: Sequence[ScheduledRequest], query_start: NDArray[np.int32], total: int) -> Tensor | None:
        last = [int(end) - 1 for row, end in zip(rows, query_start[1:].tolist(), strict=True) if row.samples]
        return None if len(last) == total else self._tensor(np.array(last, dtype=np.int64))

    def _tensor(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        # Shares memory on a CPU, copies to any other device.
        return torch.from_numpy(array).to(self._device)


def _new_tokens(row: ScheduledRequest) -> Sequence[int]:
    """Known tokens start … start + num_new_tokens - 1 of prompt + output."""
    num_prompt = len(row.prompt_token_ids)
    if row.start >= num_prompt:
        first = row.start - num_prompt
        return row.output_token_ids[first : first + row.num_new_tokens]
    end = row.start + row.num_new_tokens
    chunk = row.prompt_token_ids[row.start : end]
    return chunk + row.output_token_ids[: end - num_prompt] if end > num_prompt else chunk
