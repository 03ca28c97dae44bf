"""Batches over a paged cache for tests: sequences that grow by chunks, laid out as the runner would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_worker.models.base import Model
from kernels.ops import BatchLayout, KVCache

__all__ = ["PagedModel", "Row", "make_layout", "poison"]


@dataclass(frozen=True)
class Row:
    """`count` new tokens from position `start` on, in the blocks of `blocks`."""

    start: int
    count: int
    blocks: Sequence[int]


def make_layout(rows: Sequence[Row], block_size: int, device: str = "cpu") -> BatchLayout:
    """The BatchLayout of these rows; unused block table entries hold an id that does not exist."""
    starts = [0]
    slots, positions = [], []
    for row in rows:
        starts.append(starts[-1] + row.count)
        for position in range(row.start, row.start + row.count):
            positions.append(position)
            slots.append(row.blocks[position // block_size] * block_size + position % block_size)
    width = max(len(row.blocks) for row in rows)
    tables = [[*row.blocks, *[1 << 30] * (width - len(row.blocks))] for row in rows]
    lengths = [row.start + row.count for row in rows]
    return BatchLayout(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        num_tokens=starts[-1],
        max_query_len=max(row.count for row in rows),
        max_seq_len=max(lengths),
    )


def poison(cache: KVCache) -> None:
    """Fills every page with NaN, or its scales: whatever reads a slot that was not written shows."""
    for layer in cache.scales or cache.layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))


class PagedModel:
    """A model with a poisoned cache whose blocks are handed out in shuffled order, and sequences by number."""

    def __init__(self, model: Model, *, num_blocks: int = 256, block_size: int = 16, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        self.cache = model.new_kv_cache(num_blocks, block_size)
        poison(self.cache)
        generator = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def run(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """One step: (sequence, its next token ids) … -> logits float32 [new tokens, V] of each."""
        rows, tokens = [], []
        for sequence, ids in chunks:
            start = self._lengths.get(sequence, 0)
            blocks = self._blocks.setdefault(sequence, [])
            while len(blocks) * self.block_size < start + len(ids):
                blocks.append(self._free.pop())
            rows.append(Row(start, len(ids), blocks))
            self._lengths[sequence] = start + len(ids)
            tokens.extend(ids)
        layout = make_layout(rows, self.block_size, self.model.device.type)
        output = self.model.forward(torch.tensor(tokens, device=self.model.device), layout, self.cache)
        return list(output.logits.clone().split([row.count for row in rows]))
