"""Rotary embedding, cache writes and paged attention against the reference, in pools full of NaN."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.native import NativeOps
from kernels.reference import ReferenceOps
from tests.support.kernel_cases import Batch, make_batch, random_tensor, relative_error, rope_table

MIXED = [(1, 1), (1, 16), (1, 17), (1, 300), (5, 5), (16, 32), (33, 33), (7, 100), (70, 130), (1, 255), (1, 1025)]
MODELS = [(9, 3, 64), (4, 4, 8), (8, 1, 80), (6, 2, 128), (5, 1, 20), (2, 1, 256), (14, 2, 64), (8, 2, 96), (32, 2, 32)]


def _attend(native: NativeOps, batch: Batch, dtype: torch.dtype, seed: int = 5) -> None:
    """Both backends rotate, write and attend; results and cache contents must agree."""
    heads, cache = batch.heads, batch.cache
    rope = rope_table(cache.head_dim, batch.layout.max_seq_len)
    width = (heads + 2 * cache.num_kv_heads) * cache.head_dim
    qkv = random_tensor((batch.layout.num_tokens, width), dtype, seed)
    twin = batch.twin_cache()
    ours = native.begin(batch.layout, cache, rope)
    theirs = ReferenceOps().begin(batch.layout, twin, rope)
    exact = dtype is torch.float32
    query, wanted_query = ours.rope_and_cache(qkv.clone(), 0, heads), theirs.rope_and_cache(qkv.clone(), 0, heads)
    assert relative_error(query, wanted_query) < (1e-6 if exact else 1e-2)
    slots = batch.layout.slot_mapping
    for mine, other in zip(cache.layers[0], twin.layers[0], strict=True):
        got_slots, wanted_slots = mine.flatten(0, 1), other.flatten(0, 1)
        assert relative_error(got_slots[slots], wanted_slots[slots]) < (1e-6 if exact else 1e-2)
        untouched = torch.ones(len(got_slots), dtype=torch.bool)
        untouched[slots] = False
        assert torch.equal(got_slots[untouched].nan_to_num(7.0), wanted_slots[untouched].nan_to_num(7.0))
    got, wanted = ours.attention(query, 0), theirs.attention(wanted_query.contiguous(), 0)
    assert relative_error(got, wanted) < (2e-6 if exact else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), MODELS)
def test_mixed_batches(
    native: NativeOps, dtype: torch.dtype, block_size: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    batch = make_batch(
        MIXED, dtype=dtype, block_size=block_size, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=heads
    )
    _attend(native, batch, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[(1, 8192)], [(3, 8192), (1, 8191)], [(200, 4099)]])
def test_long_rows(native: NativeOps, dtype: torch.dtype, rows: list[tuple[int, int]]) -> None:
    _attend(native, make_batch(rows, dtype=dtype, heads=3, kv_heads=1), dtype)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 256, 257, 272, 273, 513])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_edges(native: NativeOps, dtype: torch.dtype, length: int) -> None:
    _attend(native, make_batch([(1, length), (length, length)], dtype=dtype, seed=length), dtype)


def test_many_heads_on_one_kv_head(native: NativeOps) -> None:
    _attend(native, make_batch([(1, 40), (9, 70)], dtype=torch.bfloat16, heads=110, kv_heads=1), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_rotation_passes_the_other_features_through(native: NativeOps, dtype: torch.dtype) -> None:
    batch = make_batch([(4, 9), (1, 3)], dtype=dtype, heads=2, kv_heads=1, head_dim=32)
    rope = rope_table(12, 16)
    qkv = random_tensor((5, 4 * 32), dtype, 1)
    wanted = ReferenceOps().begin(batch.layout, batch.twin_cache(), rope).rope_and_cache(qkv.clone(), 0, 2)
    got = native.begin(batch.layout, batch.cache, rope).rope_and_cache(qkv.clone(), 0, 2)
    assert relative_error(got, wanted) < (1e-6 if dtype is torch.float32 else 1e-2)
    assert torch.equal(got[..., 12:], wanted[..., 12:])


def test_a_row_attends_the_same_alone_and_in_company(native: NativeOps) -> None:
    batch = make_batch([(1, 700), (1, 90), (40, 95)], dtype=torch.bfloat16)
    rope = rope_table(64, 700)
    query = random_tensor((42, 4, 64), torch.bfloat16, 2)
    qkv = random_tensor((42, 8 * 64), torch.bfloat16, 3)
    step = native.begin(batch.layout, batch.cache, rope)
    step.rope_and_cache(qkv, 0, 4)
    together = step.attention(query, 0)
    layout = batch.layout
    alone = type(layout)(
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=layout.seq_lens[:1].clone(),
        block_tables=layout.block_tables[:1].clone(),
        slot_mapping=layout.slot_mapping[:1].clone(),
        positions=layout.positions[:1].clone(),
        num_tokens=1,
        max_query_len=1,
        max_seq_len=700,
    )
    assert torch.equal(native.begin(alone, batch.cache, rope).attention(query[:1].clone(), 0), together[:1])
