"""Fused blocks and whole decoders against the same chain of reference operators."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels.cpu.native import NativeOps
from kernels.interface import Ops
from kernels.layout import AttentionWeights, MlpWeights
from kernels.reference import ReferenceOps
from tests.support.kernel_cases import Batch, make_batch, random_tensor, relative_error, rope_table

ROWS = [(1, 20), (9, 25), (1, 3), (40, 40)]
SHAPES = [(576, 9, 3, 64, 1536), (32, 4, 2, 8, 40), (100, 5, 5, 20, 72)]
Layers = list[tuple[AttentionWeights, MlpWeights]]


def _layers(
    ops: Ops, count: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, *, biased: bool = False
) -> Layers:
    hidden, heads, kv_heads, dim, inner = shape

    def weight(out: int, size: int, seed: int) -> tuple[Tensor, Tensor | None]:
        bias = random_tensor((out,), dtype, seed + 1, 0.1) if biased else None
        return random_tensor((out, size), dtype, seed, size**-0.5), bias

    layers = []
    for i in range(count):
        seed = 100 * i
        attention = AttentionWeights(
            norm=random_tensor((hidden,), dtype, seed),
            qkv=ops.pack_linear(*weight((heads + 2 * kv_heads) * dim, hidden, seed + 2)),
            output=ops.pack_linear(*weight(hidden, heads * dim, seed + 4)),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            eps=1e-5,
        )
        mlp = MlpWeights(
            norm=random_tensor((hidden,), dtype, seed + 6),
            gate_up=ops.pack_linear(*weight(2 * inner, hidden, seed + 8)),
            down=ops.pack_linear(*weight(hidden, inner, seed + 10)),
            eps=1e-5,
        )
        layers.append((attention, mlp))
    return layers


def _batch(shape: tuple[int, int, int, int, int], dtype: torch.dtype, rows: list[tuple[int, int]], count: int) -> Batch:
    _, heads, kv_heads, dim, _ = shape
    return make_batch(rows, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=dim, layers=count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_blocks_match_the_reference_chain(
    native: NativeOps, dtype: torch.dtype, shape: tuple[int, int, int, int, int], biased: bool, first: bool
) -> None:
    batch = _batch(shape, dtype, ROWS, 1)
    rope, reference = rope_table(shape[3], 64), ReferenceOps()
    x = random_tensor((batch.layout.num_tokens, shape[0]), dtype, 50)
    stream = None if first else random_tensor(x.shape, torch.float32, 51)
    results = []
    for ops, cache in ((native, batch.cache), (reference, batch.twin_cache())):
        ((attention, mlp),) = _layers(ops, 1, shape, dtype, biased=biased)
        step = ops.begin(batch.layout, cache, rope)
        out, total = ops.attention_block(x.clone(), None if stream is None else stream.clone(), attention, step, 0)
        results += [out.clone(), total.clone()]
        results += ops.mlp_block(out, total, mlp)
    half = len(results) // 2
    for got, wanted in zip(results[:half], results[half:], strict=True):
        assert relative_error(got, wanted) < (3e-6 if dtype is torch.float32 else 2.5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_is_the_chain_of_its_blocks(native: NativeOps, dtype: torch.dtype) -> None:
    shape = SHAPES[0]
    batch = _batch(shape, dtype, ROWS, 3)
    rope = rope_table(64, 64)
    layers = _layers(native, 3, shape, dtype)
    x = random_tensor((batch.layout.num_tokens, shape[0]), dtype, 50)
    twin = batch.twin_cache()
    got = native.decoder(x.clone(), layers, native.begin(batch.layout, batch.cache, rope))
    wanted = super(NativeOps, native).decoder(x.clone(), layers, native.begin(batch.layout, twin, rope))
    for mine, other in zip(got, wanted, strict=True):
        assert torch.equal(mine, other)


def test_steps_of_growing_and_shrinking_batches_share_scratch(native: NativeOps) -> None:
    """Scratch memory of a bigger step must not leak into a smaller one."""
    shape = SHAPES[2]
    rope, reference = rope_table(20, 600), ReferenceOps()
    for rows in ([(1, 5)], [(130, 300), (1, 600)], [(2, 2)], [(1, 599), (3, 3)], [(1, 1)]):
        batch = _batch(shape, torch.float32, rows, 1)
        x = random_tensor((batch.layout.num_tokens, shape[0]), torch.float32, 50)
        outputs = []
        for ops, cache in ((native, batch.cache), (reference, batch.twin_cache())):
            layers = _layers(ops, 1, shape, torch.float32)
            outputs.append(ops.decoder(x.clone(), layers, ops.begin(batch.layout, cache, rope)))
        for got, wanted in zip(*outputs, strict=True):
            assert relative_error(got, wanted) < 3e-6


def test_two_threads_may_share_an_op_table(native: NativeOps) -> None:
    """Two engines of one process on one model: each thread has its own scratch and its own cache."""
    shape = SHAPES[0]
    rope = rope_table(64, 64)
    layers = _layers(native, 2, shape, torch.float32)

    def outputs(seed: int) -> list[torch.Tensor]:
        batch = _batch(shape, torch.float32, ROWS, 2)
        x = random_tensor((batch.layout.num_tokens, shape[0]), torch.float32, seed)
        return [native.decoder(x.clone(), layers, native.begin(batch.layout, batch.cache, rope))[0] for _ in range(20)]

    alone = [outputs(seed) for seed in (60, 61)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(outputs, (60, 61)))
    for mine, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
