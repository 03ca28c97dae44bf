"""Rotation against complex numbers, and where keys and values land."""

from __future__ import annotations

import pytest
import torch

from engine_worker.layers.rope import RopeConfig, rope_table
from kernels.interface import Ops
from kernels.ops import new_kv_cache
from tests.kernels.oracles import rotate_pairs
from tests.support.paged import Row, make_layout, poison

HEADS, KV_HEADS, DIM, BLOCK, THETA = 3, 1, 8, 4, 100.0
ROWS = [Row(0, 3, [4]), Row(6, 1, [2, 0]), Row(3, 4, [1, 5])]


@pytest.mark.parametrize("rotary_dim", [DIM, 4])
def test_rotates_queries_and_keys_and_writes_exactly_the_batch_slots(backend: tuple[Ops, str], rotary_dim: int) -> None:
    ops, device = backend
    torch.manual_seed(0)
    cache = new_kv_cache(2, 6, BLOCK, KV_HEADS, DIM, torch.float32, device)
    poison(cache)
    layout = make_layout(ROWS, BLOCK, device)
    qkv = torch.randn(layout.num_tokens, (HEADS + 2 * KV_HEADS) * DIM, device=device)
    table = rope_table(RopeConfig(THETA, rotary_dim), 32, torch.device(device))

    with torch.inference_mode():
        query = ops.begin(layout, cache, table).rope_and_cache(qkv.clone(), 1, HEADS)  # which is used up

    heads = qkv.cpu().view(-1, HEADS + 2 * KV_HEADS, DIM)
    positions = layout.positions.tolist()
    turned = rotate_pairs(heads[:, : HEADS + KV_HEADS], positions, THETA, rotary_dim)
    torch.testing.assert_close(query.cpu().double(), turned[:, :HEADS], rtol=1e-4, atol=1e-5)
    key, value = (pages.view(-1, KV_HEADS, DIM).cpu() for pages in cache.layers[1])
    slots = layout.slot_mapping.cpu()
    torch.testing.assert_close(key[slots].double(), turned[:, HEADS:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value[slots], heads[:, HEADS + KV_HEADS :], rtol=0, atol=0)
    others = [slot for slot in range(key.shape[0]) if slot not in set(slots.tolist())]
    assert key[others].isnan().all()
    assert value[others].isnan().all()
    assert all(pages.isnan().all() for pages in cache.layers[0])


def test_bfloat16_is_rotated_in_float32(backend: tuple[Ops, str]) -> None:
    ops, device = backend
    cache = new_kv_cache(1, 2048, BLOCK, KV_HEADS, DIM, torch.bfloat16, device)
    row = Row(7000, 1, list(range(1751)))
    layout = make_layout([row], BLOCK, device)
    qkv = torch.randn(1, (HEADS + 2 * KV_HEADS) * DIM, device=device).bfloat16()
    table = rope_table(RopeConfig(THETA, DIM), 8192, torch.device(device))
    with torch.inference_mode():
        query = ops.begin(layout, cache, table).rope_and_cache(qkv.clone(), 0, HEADS)
    heads = qkv.cpu().view(1, -1, DIM)[:, :HEADS]
    expected = rotate_pairs(heads, [7000], THETA, DIM)
    # One rounding to bfloat16 (8 bits) and float32 angles: nothing more.
    torch.testing.assert_close(query.cpu().double(), expected, rtol=2**-8, atol=5e-3)
