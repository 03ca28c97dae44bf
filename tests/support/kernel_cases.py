"""Batches and weights for kernel tests: random but valid block tables in a pool whose unused slots hold NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import BatchLayout, KVCache, RopeTable, new_kv_cache
from tests.support.paged import poison

__all__ = ["Batch", "make_batch", "random_tensor", "relative_error", "rope_table"]


@dataclass(frozen=True)
class Batch:
    """A batch whose rows already have `seq_len - query_len` tokens in the cache."""

    layout: BatchLayout
    cache: KVCache
    heads: int

    def twin_cache(self) -> KVCache:
        """The same contents in memory of its own."""
        cache = self.cache
        twin = new_kv_cache(
            len(cache.layers),
            cache.num_blocks,
            cache.block_size,
            cache.num_kv_heads,
            cache.head_dim,
            cache.dtype,
            "cpu",
            cache.storage,
        )
        for mine, other in zip((*twin.layers, *twin.scales), (*cache.layers, *cache.scales), strict=True):
            mine.key.copy_(other.key)
            mine.value.copy_(other.value)
        return twin


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Normal values, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tuple(shape), generator=generator) * scale).to(dtype)


def rope_table(rotary_dim: int, positions: int) -> RopeTable:
    """Plain rotary angles with theta 10,000."""
    frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return RopeTable(angles.cos().contiguous(), angles.sin().contiguous())


def make_batch(
    rows: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    storage: torch.dtype | None = None,
    block_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    layers: int = 1,
    seed: int = 0,
) -> Batch:
    """rows: (query_len, seq_len) each. Blocks are scattered, tables over-long with garbage past the last block, and
    every slot no row has written yet is NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for _, length in rows]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.full((len(rows), max(counts) + 2), 2_000_000_000, dtype=torch.int32)
    cache = new_kv_cache(layers, num_blocks, block_size, kv_heads, head_dim, dtype, "cpu", storage)
    poison(cache)
    slots, positions, starts, used = [], [], [0], 0
    for row, ((query, length), count) in enumerate(zip(rows, counts, strict=True)):
        tables[row, :count] = order[used : used + count]
        used += count
        all_positions = torch.arange(length)
        all_slots = tables[row].long()[all_positions // block_size] * block_size + all_positions % block_size
        past = all_slots[: length - query]
        for layer in range(layers):
            for kind in range(2):
                _fill(cache, layer, kind, past, torch.randn(len(past), kv_heads, head_dim, generator=generator))
        slots.append(all_slots[length - query :])
        positions.append(all_positions[length - query :])
        starts.append(starts[-1] + query)
    layout = BatchLayout(
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([length for _, length in rows], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        positions=torch.cat(positions),
        num_tokens=starts[-1],
        max_query_len=max(query for query, _ in rows),
        max_seq_len=max(length for _, length in rows),
    )
    return Batch(layout, cache, heads)


def _fill(cache: KVCache, layer: int, kind: int, slots: Tensor, x: Tensor) -> None:
    """x float32 [S, kv_heads, head_dim] -> keys (kind 0) or values (1) of these slots."""
    if cache.scales:
        scale = x.abs().amax(-1) / 127
        cache.scales[layer][kind].flatten(0, 1)[slots] = scale
        x = (x / scale[..., None]).round()
    cache.layers[layer][kind].flatten(0, 1)[slots] = x.to(cache.storage)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted magnitude; NaN where `got` holds one."""
    wanted = wanted.double()
    return float((got.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
