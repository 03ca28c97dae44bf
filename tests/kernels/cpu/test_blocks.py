"""Fused blocks and whole decoders against the same chain of reference operators."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels.cpu.isa import Level, available_levels
from kernels.cpu.library import Library
from kernels.cpu.native import NativeOps
from kernels.interface import Ops
from kernels.layout import AttentionWeights, MlpWeights, ModelWeights
from kernels.reference import ReferenceOps
from tests.support.kernel_cases import Batch, make_batch, random_tensor, relative_error, rope_table

ROWS = [(1, 20), (9, 25), (1, 3), (40, 40)]
SHAPES = [(576, 9, 3, 64, 1536), (32, 4, 2, 8, 40), (100, 5, 5, 20, 72)]
WORDS = 70
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


def _model(ops: Ops, count: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> ModelWeights:
    table = random_tensor((WORDS, shape[0]), dtype, 7)
    return ModelWeights(
        embedding=ops.pack_embedding(table),
        layers=_layers(ops, count, shape, dtype),
        norm=random_tensor((shape[0],), dtype, 8),
        eps=1e-5,
        head=ops.pack_linear(random_tensor((WORDS, shape[0]), dtype, 9, shape[0] ** -0.5)),
        dtype=dtype,
    )


def _token_ids(count: int, seed: int) -> Tensor:
    return torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize("sample_at", [None, [11, 0, 49], []], ids=["all", "some", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_the_chain_of_its_operators(
    native: NativeOps, dtype: torch.dtype, sample_at: list[int] | None
) -> None:
    shape = SHAPES[0]
    batch = _batch(shape, dtype, ROWS, 3)
    rope = rope_table(64, 64)
    weights, ids = _model(native, 3, shape, dtype), _token_ids(batch.layout.num_tokens, 50)
    places = None if sample_at is None else torch.tensor(sample_at, dtype=torch.int64)
    twin = batch.twin_cache()
    got = native.forward(weights, ids, places, native.begin(batch.layout, batch.cache, rope))
    wanted = super(NativeOps, native).forward(weights, ids, places, native.begin(batch.layout, twin, rope))
    for mine, other in zip(got, wanted, strict=True):
        assert torch.equal(mine, other)
    assert got.logits.shape == (batch.layout.num_tokens if sample_at is None else len(sample_at), WORDS)


@pytest.mark.parametrize("count", [1, 3, 15, 16, 17, 33, 70, 1000])
def test_the_best_token_is_the_first_largest_and_nan_counts_as_that(native: NativeOps, count: int) -> None:
    """Logits chosen through the head's bias: the hidden states add nothing."""
    shape = SHAPES[0]
    batch = _batch(shape, torch.float32, [(1, 1), (1, 2)], 1)
    generator = torch.Generator().manual_seed(count)
    cases = [torch.randn(count, generator=generator) for _ in range(4)]
    cases += [torch.full((count,), value) for value in (0.0, -1.5, -torch.inf, torch.inf, torch.nan)]
    for place in {0, count // 2, count - 1}:
        for value in (torch.nan, torch.inf, 9.0):
            cases.append(torch.randn(count, generator=generator))
            cases[-1][place:] = torch.where(torch.arange(place, count) % 2 == place % 2, value, -torch.inf)
    model = _model(native, 1, shape, torch.float32)
    for bias in cases:
        weights = dataclasses.replace(model, head=native.pack_linear(torch.zeros(count, shape[0]), bias))
        step = native.begin(batch.layout, batch.cache, rope_table(64, 64))
        got = native.forward(weights, _token_ids(2, 0), None, step)
        torch.testing.assert_close(got.logits[0], bias, rtol=0, atol=0, equal_nan=True)
        assert got.best.tolist() == [int(bias.numpy().argmax())] * 2
        torch.testing.assert_close(got.peaks, bias[got.best], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("level", available_levels(), ids=lambda level: level.name)
@pytest.mark.parametrize("weight_format", ["", "int8", "q8_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_logits_are_stored_where_they_are_wanted_and_the_largest_is_known_of_all(
    level: Level, weight_format: str, threads: int
) -> None:
    shape, rope, dtype = SHAPES[0], rope_table(64, 64), torch.bfloat16
    batch, ids = _batch(shape, dtype, [(40, 40), (1, 9), (60, 64)], 2), _token_ids(101, 50)
    places = torch.tensor([100, 40, 0, 39, 7])
    ops = NativeOps(Library(level), threads)
    model, head = _model(ops, 2, shape, dtype), torch.randn(333, shape[0], generator=torch.Generator().manual_seed(8))
    weights = dataclasses.replace(model, head=ops.pack_linear(head.to(dtype), weight_format=weight_format))
    for sample_at in (places, None):

        def run(wanted: list[int] | None, at: torch.Tensor | None = sample_at) -> list[torch.Tensor]:
            step = ops.begin(batch.layout, batch.twin_cache(), rope)
            return [part.clone() for part in ops.forward(weights, ids, at, step, wanted)]

        count = 101 if sample_at is None else 5
        hidden, logits, best, peaks = run(None)
        assert torch.equal(logits, ops.logits(hidden if sample_at is None else hidden[sample_at], weights.head))
        assert torch.equal(best, logits.argmax(-1))
        assert torch.equal(peaks, logits.amax(-1))
        for wanted in ([], [0], [1, 4], [count - 1], list(range(count))):
            for mine, other in zip(run(wanted), (hidden, logits[wanted], best, peaks), strict=True):
                assert torch.equal(mine, other)


def test_a_token_or_place_that_does_not_exist_is_refused(native: NativeOps) -> None:
    shape = SHAPES[0]
    batch = _batch(shape, torch.float32, [(1, 1), (1, 2)], 1)
    weights, step = _model(native, 1, shape, torch.float32), native.begin(batch.layout, batch.cache, rope_table(64, 64))
    for ids, places in (([0, WORDS], None), ([-1, 0], None), ([0, 1], [2]), ([0, 1], [-1])):
        at = None if places is None else torch.tensor(places)
        with pytest.raises(ValueError, match="token ids must lie between 0 and 69"):
            native.forward(weights, torch.tensor(ids), at, step)
    for ids in ([0], [0, 1, 2]):
        with pytest.raises(ValueError, match="expected 2 token ids"):
            native.forward(weights, torch.tensor(ids), None, step)


def test_steps_of_growing_and_shrinking_batches_share_scratch(native: NativeOps) -> None:
    """Scratch memory of a bigger step must not leak into a smaller one."""
    shape = SHAPES[1]
    rope, reference = rope_table(8, 600), ReferenceOps()
    models = [(ops, _model(ops, 1, shape, torch.float32)) for ops in (native, reference)]
    for rows in ([(1, 5)], [(130, 300), (1, 600)], [(2, 2)], [(1, 599), (3, 3)], [(1, 1)]):
        batch = _batch(shape, torch.float32, rows, 1)
        ids = _token_ids(batch.layout.num_tokens, 50)
        outputs = []
        for (ops, weights), cache in zip(models, (batch.cache, batch.twin_cache()), strict=True):
            outputs.append(ops.forward(weights, ids, None, ops.begin(batch.layout, cache, rope)))
        for got, wanted in zip(*outputs, strict=True):
            assert relative_error(got, wanted) < 3e-6


@pytest.mark.parametrize("level", available_levels(), ids=lambda level: level.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_gives_the_same_bits(level: Level, dtype: torch.dtype) -> None:
    """Long prompts are cut into parts that threads have a home in: as many as there are threads, or rows for."""
    shape = SHAPES[1]
    library, rope, ids = Library(level), rope_table(8, 1200), _token_ids(1136, 3)
    outputs = []
    for threads in (1, 2, 3, 5, 12):
        ops = NativeOps(library, threads)
        batch = _batch(shape, dtype, [(1, 700), (130, 300), (5, 5), (1000, 1200)], 2)
        step = ops.begin(batch.layout, batch.cache, rope)
        outputs.append([part.clone() for part in ops.forward(_model(ops, 2, shape, dtype), ids, None, step)])
    for other in outputs[1:]:
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(other, outputs[0], strict=True))


def test_two_threads_may_share_an_op_table(native: NativeOps) -> None:
    """Two engines of one process on one model: each thread has its own scratch and its own cache."""
    shape = SHAPES[0]
    rope = rope_table(64, 64)
    weights = _model(native, 2, shape, torch.float32)

    def outputs(seed: int) -> list[torch.Tensor]:
        batch = _batch(shape, torch.float32, ROWS, 2)
        ids = _token_ids(batch.layout.num_tokens, seed)
        step = native.begin
        return [
            native.forward(weights, ids, None, step(batch.layout, batch.cache, rope)).hidden.clone() for _ in range(20)
        ]

    alone = [outputs(seed) for seed in (60, 61)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(outputs, (60, 61)))
    for mine, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_threads_that_compute_do_not_wait_for_each_other_behind_programs_that_give_way(native: NativeOps) -> None:
    """`headrace serve` starts all programs as SCHED_BATCH; threads that compute leave that class, and alone those."""
    shape = SHAPES[0]
    rope, weights, ids = rope_table(64, 64), _model(native, 2, shape, torch.bfloat16), _token_ids(51, 5)

    def compute() -> tuple[Tensor, int]:
        batch = _batch(shape, torch.bfloat16, ROWS, 2)
        output = native.forward(weights, ids, None, native.begin(batch.layout, batch.cache, rope))
        return output.hidden.clone(), os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as bystander:
        for thread in (pool, bystander):
            thread.submit(os.sched_setscheduler, 0, os.SCHED_BATCH, os.sched_param(0)).result()
        hidden, policy = pool.submit(compute).result()
        assert bystander.submit(os.sched_getscheduler, 0).result() == os.SCHED_BATCH
    assert policy == os.SCHED_OTHER
    assert torch.equal(hidden, compute()[0])
