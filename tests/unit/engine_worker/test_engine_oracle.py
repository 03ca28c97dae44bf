"""Greedy tokens against transformers' generate run alone: whatever the batch, the chunks, the blocks, the cache."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest
import torch

from engine_worker.config import EngineConfig
from engine_worker.models.base import LoadedModel
from engine_worker.request import Request
from engine_worker.runner.runner import Runner
from tests.support.engines import EngineRun, OracleRun, engine_for, oracle
from tests.support.requests import make_request
from tests.support.rows import make_row

OUTPUT = 12
SAFE_MARGIN = 5e-4
"""Between the two best logits; float32 results of other batches differ by less than a hundredth of this (SM-03)."""


def make_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(count - 2))]
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[tuple[list[int], OracleRun]]:
    """48 prompts on which greedy is well defined: where a margin is too small, another prompt is taken."""
    runs = ((prompt, oracle(reference, prompt, OUTPUT)) for prompt in make_prompts(90, 160))
    return list(islice((run for run in runs if min(run[1].margins) > SAFE_MARGIN), 48))


def requests_for(expected: list[tuple[list[int], OracleRun]]) -> list[Request]:
    return [make_request(prompt, OUTPUT) for prompt, _ in expected]


def check(run: EngineRun, requests: list[Request], expected: list[tuple[list[int], OracleRun]]) -> None:
    for request, (_, wanted) in zip(requests, expected, strict=True):
        assert run.tokens(request) == wanted.tokens
        assert run.end(request).finish_reason == "length"


# Every value of each setting with every value of each other one (a Latin square).
@pytest.mark.parametrize(
    ("block_size", "budget", "max_num_seqs"),
    [
        (1, 16, 1),
        (1, 64, 3),
        (1, 2048, 48),
        (16, 16, 48),
        (16, 64, 1),
        (16, 2048, 3),
        (32, 16, 3),
        (32, 64, 48),
        (32, 2048, 1),
    ],
)
def test_staggered_arrivals_equal_their_solo_runs(
    tiny: LoadedModel, expected: list[tuple[list[int], OracleRun]], block_size: int, budget: int, max_num_seqs: int
) -> None:
    engine = engine_for(
        tiny,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        num_blocks=10_000 // block_size,
    )
    requests = requests_for(expected)
    check(EngineRun(engine).staggered(requests, every=1), requests, expected)


@pytest.mark.parametrize("caching", [True, False])
def test_a_small_pool_preempts_and_changes_nothing(
    tiny: LoadedModel, expected: list[tuple[list[int], OracleRun]], caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_worker.scheduling.scheduler.HEADROOM_TOKENS", 0)
    engine = engine_for(
        tiny, block_size=4, num_blocks=60, max_num_seqs=48, max_num_batched_tokens=64, enable_prefix_caching=caching
    )
    requests = requests_for(expected)
    run = EngineRun(engine)
    run.add(*requests)
    check(run.finish(), requests, expected)
    assert engine.stats().counters["preemptions"] > 0


@pytest.mark.parametrize("budget", [1, 4, 7, 16])
def test_kv_07_miss_hit_partial_hit_chunks_and_resume_give_the_same_tokens(
    tiny: LoadedModel, reference: Any, budget: int
) -> None:
    block_size = 4
    engine = engine_for(tiny, block_size=block_size, num_blocks=40, max_num_batched_tokens=budget)
    run = EngineRun(engine)
    tokens = make_prompts(3, 40, seed=5)[1]
    partial_hits = set()
    for length in range(1, 3 * block_size + 2):
        wanted = oracle(reference, tokens[:length], 6)
        cold = make_request(tokens[:length], 6, salt=f"cold {length}", logprobs=0)
        hot = make_request(tokens[:length], 6, salt=f"cold {length}", logprobs=0)
        partial = make_request(tokens[:length], 6, logprobs=0)
        resumed = make_request(tokens[:length], 6, output=wanted.tokens[:3], logprobs=0)
        for request in (partial, cold, hot, resumed):
            run.add(request)
            run.finish()
            assert request.output_token_ids == wanted.tokens
            given = [event.logprobs.logprob for event in run.events[request.request_id] if event.logprobs is not None]
            assert given == pytest.approx(wanted.logprobs[-len(given) :], abs=1e-4)
        partial_hits.add(partial.num_cached_tokens)
        assert hot.num_cached_tokens == (length - 1) // block_size * block_size
        # Part of the cache goes: a request that needs all but one or two blocks of the pool.
        filler = make_request([length] * ((38 + length % 2) * block_size), 1, salt=str(length))
        run.add(filler)
        run.finish()
    assert partial_hits == {0, 4, 8}, "the longest prompt has 12 tokens in full blocks"


def test_kv_12_whatever_unused_slots_hold_never_reaches_a_result(
    tiny: LoadedModel, expected: list[tuple[list[int], OracleRun]]
) -> None:
    engine = engine_for(tiny, block_size=16, num_blocks=400, max_num_batched_tokens=64, max_num_seqs=8)
    for layer in engine._runner.kv_cache.layers:
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    requests = requests_for(expected[:16])
    run = EngineRun(engine)
    run.add(*requests)
    check(run.finish(), requests, expected[:16])


def test_repeated_prompts_share_blocks_and_equal_the_first_run(tiny: LoadedModel, reference: Any) -> None:
    prompt = make_prompts(2, 70, seed=8)[1]
    wanted = oracle(reference, prompt, 8)
    engine = engine_for(tiny, block_size=16)
    requests = [make_request(prompt, 8) for _ in range(6)]
    run = EngineRun(engine)
    run.add(*requests)
    run.finish()
    assert all(run.tokens(request) == wanted.tokens for request in requests)
    assert [run.end(request).num_cached_tokens for request in requests] == [0, *[64] * 5]
    assert engine.stats().counters["computed_tokens"] == 70 + 5 * 6 + 6 * 7


def test_sm_03_margins_are_far_above_what_batching_changes(
    tiny: LoadedModel, expected: list[tuple[list[int], OracleRun]]
) -> None:
    assert len(expected) == 48
    rows = [
        make_row(prompt, request_id=str(i), block_table=list(range(i * 10, i * 10 + 10)))
        for i, (prompt, _) in enumerate(expected)
    ]
    config = EngineConfig(max_num_batched_tokens=10_000)
    runner = Runner(tiny.model, config, num_blocks=480, max_request_tokens=512)
    together = runner.run(rows).logits.clone()
    alone = [runner.run([row]).logits.clone() for row in rows]
    for row, single in zip(together, alone, strict=True):
        assert 100 * float((row - single[0]).abs().max()) < SAFE_MARGIN
