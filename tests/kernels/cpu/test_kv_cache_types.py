"""A KV cache that holds another type than the model computes in: int8 with a scale for each token and head, bfloat16
under a float32 model, against the reference and against attention over the values before they were rounded."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.isa import Level, available_levels
from kernels.cpu.library import Library
from kernels.cpu.native import NativeOps
from kernels.interface import Ops
from kernels.ops import KVCache, kv_cache_bytes, new_kv_cache
from kernels.reference import ReferenceOps, quantize_heads
from tests.kernels.oracles import attend
from tests.support.kernel_cases import Batch, make_batch, random_tensor, relative_error, rope_table

MIXED = [(1, 1), (1, 16), (1, 17), (1, 300), (5, 5), (16, 32), (70, 130), (1, 1025), (3, 600)]
STORAGES = [torch.int8, torch.bfloat16, torch.float32]


def _write(ops: Ops, batch: Batch, cache: KVCache, qkv: torch.Tensor) -> torch.Tensor:
    rope = rope_table(cache.head_dim, batch.layout.max_seq_len)
    step = ops.begin(batch.layout, cache, rope)
    query = step.rope_and_cache(qkv.clone(), 0, batch.heads).contiguous()
    return step.attention(query, 0)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 1, 80, 1), (2, 2, 20, 32), (14, 2, 96, 48)],
)
def test_mixed_batches_equal_the_reference(
    native: NativeOps,
    dtype: torch.dtype,
    storage: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    batch = make_batch(
        MIXED, dtype=dtype, storage=storage, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    twin = batch.twin_cache()
    qkv = random_tensor((batch.layout.num_tokens, (heads + 2 * kv_heads) * head_dim), dtype, 3)
    got, wanted = _write(native, batch, batch.cache, qkv), _write(ReferenceOps(), batch, twin, qkv)
    exact = dtype is torch.float32
    # In float32 a key may lie on the edge between two of 255 (or two bfloat16) values and fall to either side.
    assert relative_error(got, wanted) < ((2e-6 if storage is torch.float32 else 5e-3) if exact else 2e-2)
    slots = batch.layout.slot_mapping
    for mine, other in zip((*batch.cache.layers, *batch.cache.scales), (*twin.layers, *twin.scales), strict=True):
        for got_page, wanted_page in zip(mine, other, strict=True):
            written, expected = got_page.flatten(0, 1)[slots].float(), wanted_page.flatten(0, 1)[slots].float()
            if got_page.dtype is torch.int8:
                assert (written - expected).abs().max() <= 1
                assert (written != expected).float().mean() < 0.02
            else:
                torch.testing.assert_close(written, expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("rows", [[(1, 8192)], [(3, 4097), (1, 63)], [(65, 65), (1, 64)]])
def test_int8_stays_within_its_error_bound_of_exact_attention(native: NativeOps, rows: list[tuple[int, int]]) -> None:
    """Half a scale on every key moves a score by at most sum(|q|) * scale / 2 / sqrt(dim), hence a weight by a factor
    of e^(twice that); a value moves by half its scale. Checked on the largest of them."""
    batch = make_batch(rows, dtype=torch.float32, storage=torch.int8, heads=2, kv_heads=1)
    cache, layout = batch.cache, batch.layout
    query = random_tensor((layout.num_tokens, 2, 64), torch.float32, 8)
    # The slots the batch would write now.
    for kind, seed in ((0, 4), (1, 5)):
        new = random_tensor((layout.num_tokens, 1, 64), torch.float32, seed)
        codes, scale = quantize_heads(new)
        cache.layers[0][kind].flatten(0, 1)[layout.slot_mapping] = codes
        cache.scales[0][kind].flatten(0, 1)[layout.slot_mapping] = scale
    got = native.begin(layout, cache, rope_table(64, 8192)).attention(query, 0).view(-1, 2, 64)
    token = 0
    for row, (count, length) in enumerate(rows):
        positions = torch.arange(length)
        slots = layout.block_tables[row].long()[positions // 16] * 16 + positions % 16
        exact = [
            cache.layers[0][kind].flatten(0, 1)[slots].double() * cache.scales[0][kind].flatten(0, 1)[slots][..., None]
            for kind in range(2)
        ]
        wanted = attend(query[token : token + count], exact[0], exact[1], list(range(length - count, length)))
        assert relative_error(got[token : token + count], wanted) < 1e-5
        token += count


def test_quantize_heads_rounds_to_half_a_scale() -> None:
    x = random_tensor((50, 3, 64), torch.float32, 1) * 10.0 ** torch.arange(-3, 3).repeat(25).view(50, 3, 1)
    codes, scale = quantize_heads(x)
    assert codes.abs().max() == 127
    assert ((codes * scale[..., None] - x).abs() <= 0.501 * scale[..., None]).all()


@pytest.mark.parametrize("ops", ["native", "reference"])
def test_a_head_that_is_not_finite_does_not_become_a_sane_one(native: NativeOps, ops: str) -> None:
    table: Ops = native if ops == "native" else ReferenceOps()
    batch = make_batch([(1, 1)], dtype=torch.float32, storage=torch.int8, heads=1, kv_heads=1)
    qkv = random_tensor((1, 3 * 64), torch.float32, 2)
    qkv[0, 2 * 64 + 5] = float("nan")
    assert not torch.isfinite(_write(table, batch, batch.cache, qkv)).all()


DECODES = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 320, 511, 513, 1100]


def _exact_decodes(batch: Batch, query: torch.Tensor) -> torch.Tensor:
    """query [rows, heads, head_dim] -> float64 attention over the codes and scales that the cache holds."""
    cache, layout, exact = batch.cache, batch.layout, []
    for row, length in enumerate(layout.seq_lens.tolist()):
        positions = torch.arange(length)
        slots = layout.block_tables[row].long()[positions // cache.block_size] * cache.block_size
        slots += positions % cache.block_size
        keys, values = (
            page.flatten(0, 1)[slots].double() * scales.flatten(0, 1)[slots].double()[..., None]
            for page, scales in zip(cache.layers[0], cache.scales[0], strict=True)
        )
        exact.append(attend(query[row : row + 1], keys, values, [length - 1]))
    return torch.cat(exact)


@pytest.mark.parametrize("lengths", [DECODES, [700], [40]], ids=["many", "one", "short"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (14, 2, 64), (16, 1, 128), (2, 1, 256), (4, 4, 128)]
)
def test_bfloat16_decodes_add_no_more_than_their_own_rounding(
    native: NativeOps, lengths: list[int], heads: int, kv_heads: int, head_dim: int
) -> None:
    """Rows large and small, whose keys and values differ in size: only the result is rounded to bfloat16."""
    batch = make_batch(
        [(1, length) for length in lengths],
        dtype=torch.bfloat16,
        storage=torch.int8,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    width = (heads + 2 * kv_heads) * head_dim
    qkv = (
        random_tensor((len(lengths), width), torch.bfloat16, 7)
        * (10.0 ** (torch.arange(len(lengths)) % 3 - 1))[:, None]
    )
    step = native.begin(batch.layout, batch.cache, rope_table(head_dim, batch.layout.max_seq_len))
    query = step.rope_and_cache(qkv.to(torch.bfloat16), 0, heads).contiguous()
    got = step.attention(query, 0).view(-1, heads, head_dim)
    wanted = _exact_decodes(batch, query.view(-1, heads, head_dim))
    for row in range(len(lengths)):
        assert relative_error(got[row], wanted[row]) < 4e-3


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_decode_that_is_not_finite_stays_so_and_alone(native: NativeOps, part: str, bad: float) -> None:
    batch = make_batch([(1, 70), (1, 70), (1, 5)], dtype=torch.bfloat16, storage=torch.int8, heads=6, kv_heads=2)
    qkv = random_tensor((3, 10 * 64), torch.bfloat16, 2)
    qkv[1, {"query": 0, "key": 6 * 64, "value": 8 * 64}[part] + 3] = bad
    got = _write(native, batch, batch.cache, qkv).view(3, 6, 64)
    # The query head that holds it, or all that read the KV head.
    spoiled = got[1, :1] if part == "query" else got[1, :3]
    assert not torch.isfinite(spoiled).all(-1).any()
    assert torch.isfinite(got[1, 3:]).all()
    assert torch.isfinite(got[[0, 2]]).all()


def test_a_head_of_zeros_stays_zero(native: NativeOps) -> None:
    batch = make_batch([(2, 2)], dtype=torch.bfloat16, storage=torch.int8, heads=1, kv_heads=1)
    assert not _write(native, batch, batch.cache, torch.zeros(2, 3 * 64, dtype=torch.bfloat16)).any()


def test_int8_takes_little_more_than_half_of_bfloat16() -> None:
    cache = new_kv_cache(2, 10, 16, 3, 64, torch.bfloat16, "cpu", torch.int8)
    assert cache.num_bytes == kv_cache_bytes(2, 10, 16, 3, 64, torch.int8) == 2 * 2 * 10 * 16 * 3 * (64 + 4)
    assert cache.num_bytes < 0.54 * kv_cache_bytes(2, 10, 16, 3, 64, torch.bfloat16)


@pytest.mark.parametrize("level", available_levels(), ids=lambda level: level.name)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("others", [1, 40])
def test_what_was_computed_before_does_not_show(
    level: Level, dtype: torch.dtype, storage: torch.dtype, others: int
) -> None:
    """Scratch memory and slots past a row's end may hold anything, NaN included: bits are those of a fresh op table."""
    library = Library(level)
    used = NativeOps(library, 2)
    shape = {"dtype": dtype, "storage": storage, "heads": 9, "kv_heads": 3}

    sick = make_batch([(1, 200)] * others + [(70, 130)], **shape)
    for pages in (*sick.cache.layers, *sick.cache.scales):
        for page in pages:
            page.fill_(100 if page.dtype is torch.int8 else torch.nan)
    poison = torch.full((sick.layout.num_tokens, 15 * 64), torch.nan, dtype=dtype)
    for length in (1, 5, 16, 17, 31, 33, 48, 63, 64, 65, 100, 500):
        batch = make_batch([(1, length)] * others + [(5, length + 5)], **shape)
        qkv = random_tensor((batch.layout.num_tokens, 15 * 64), dtype, length)
        _write(used, sick, sick.cache, poison)
        got = _write(used, batch, batch.cache, qkv)
        assert torch.isfinite(got).all()
        assert torch.equal(got, _write(NativeOps(library, 2), batch, batch.cache, qkv))
