"""With `batch_invariant` a token's results are the same bits whatever it is computed with, at every CPU level."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from kernels.cpu.isa import available_levels
from kernels.cpu.library import Library
from kernels.cpu.native import NativeOps
from kernels.ops import BatchLayout, KVCache, new_kv_cache
from tests.support.kernel_cases import random_tensor, rope_table
from tests.support.paged import Row, make_layout

LENGTH, BLOCK = 1300, 16
TABLE = list(range(-(-LENGTH // BLOCK)))
MODELS = [(9, 3, 64), (2, 2, 128), (4, 1, 20)]


@cache
def _backend(level: str, threads: int) -> NativeOps:
    [chosen] = [known for known in available_levels() if known.name == level]
    return NativeOps(Library(chosen), threads=threads, batch_invariant=True)


@pytest.fixture(params=[level.name for level in available_levels()])
def level(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def _layout(chunks: list[tuple[int, int]]) -> BatchLayout:
    """Each (start, count) as a row of its own over the same sequence: as if it were computed by itself."""
    return make_layout([Row(start, count, TABLE) for start, count in chunks], BLOCK)


def _fill(
    dtype: torch.dtype, storage: torch.dtype, heads: int, kv_heads: int, dim: int
) -> tuple[KVCache, torch.Tensor]:
    kv = new_kv_cache(1, len(TABLE), BLOCK, kv_heads, dim, dtype, "cpu", storage)
    qkv = random_tensor((LENGTH, (heads + 2 * kv_heads) * dim), dtype, 7, scale=2.0)
    _backend("portable", 1).begin(_layout([(0, LENGTH)]), kv, rope_table(dim, LENGTH)).rope_and_cache(qkv, 0, heads)
    return kv, random_tensor((LENGTH, heads, dim), dtype, 8, scale=2.0)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), MODELS)
def test_attention_of_a_token_does_not_depend_on_its_chunk(
    level: str, dtype: torch.dtype, storage: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """One prompt in one piece, against pieces of many sizes, against single tokens, on one thread and on three."""
    kv, query = _fill(dtype, storage, heads, kv_heads, dim)
    rope = rope_table(dim, LENGTH)

    def run(chunks: list[tuple[int, int]], threads: int) -> torch.Tensor:
        rows = torch.cat([query[start : start + count] for start, count in chunks])
        return _backend(level, threads).begin(_layout(chunks), kv, rope).attention(rows, 0)

    whole = run([(0, LENGTH)], 1)
    assert torch.isfinite(whole).all()
    cuts = [0, 1, 2, 17, 64, 65, 130, 200, 511, 512, 640, 1024, 1025, 1299, LENGTH]
    pieces = [(start, end - start) for start, end in itertools.pairwise(cuts)]
    assert torch.equal(run(pieces, 3), whole)
    singles = [0, 1, 63, 64, 127, 128, 129, 255, 256, 700, 1023, 1024, 1298, 1299]
    assert torch.equal(run([(at, 1) for at in singles], 2), whole[singles])
    for at in (128, 1299):
        assert torch.equal(run([(at, 1)], 3), whole[at : at + 1])


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("features", "depth"), [(200, 64), (1536, 576)])
def test_a_row_of_a_linear_layer_does_not_depend_on_the_number_of_rows(
    level: str, dtype: torch.dtype, weight_format: str, features: int, depth: int
) -> None:
    ops = _backend(level, 2)
    source = torch.float32 if weight_format == "float32" else torch.bfloat16
    layer = ops.pack_linear(random_tensor((features, depth), source, 1), weight_format=weight_format)
    x = random_tensor((70, depth), dtype, 2)
    together = ops.linear(x, layer)
    for first, count in ((0, 1), (3, 2), (5, 3), (11, 5), (20, 13), (32, 33), (69, 1)):
        assert torch.equal(_backend(level, 1).linear(x[first : first + count], layer), together[first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_norm_does_not_depend_on_the_number_of_rows(level: str, dtype: torch.dtype) -> None:
    ops, x, weight = _backend(level, 2), random_tensor((40, 576), dtype, 3), random_tensor((576,), dtype, 4)
    together, stream = ops.add_rms_norm(x, x.float() * 3, weight, 1e-5)
    for row in (0, 7, 39):
        alone, own = ops.add_rms_norm(x[row : row + 1].clone(), x[row : row + 1].float() * 3, weight, 1e-5)
        assert torch.equal(alone, together[row : row + 1])
        assert torch.equal(own, stream[row : row + 1])
