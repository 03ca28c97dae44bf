"""The sampler on a whole batch: greedy rows, drawn rows, bans, logprobs, impossible rows, and their independence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine_worker.plan import ScheduledRequest
from engine_worker.sampling.sampler import SampledToken, Sampler
from kernels.reference import ReferenceOps
from tests.support.rows import make_row

VOCAB = 500


def make_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample(logits: torch.Tensor, *rows: ScheduledRequest) -> list[SampledToken]:
    sampler, best = Sampler(ReferenceOps()), torch.from_numpy(logits.numpy().argmax(-1))
    wanted = sampler.prepare(rows, VOCAB)
    return sampler.sample(logits[wanted], best, logits[torch.arange(len(rows)), best], list(rows), wanted)


def token(logits: torch.Tensor, row: ScheduledRequest) -> int | None:
    return sample(logits[None] if logits.dim() == 1 else logits, row)[0].token_id


def test_greedy_rows_take_the_exact_arg_max() -> None:
    logits = make_logits(4)
    assert [s.token_id for s in sample(logits, *[make_row()] * 4)] == logits.argmax(-1).tolist()


def test_one_best_logit_apart_by_the_last_bit_is_found() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 77] = 1e-45
    assert token(logits, make_row()) == 77


def test_sm_01_a_seeded_row_draws_the_same_alone_and_in_any_company() -> None:
    logits = make_logits(5)
    row = make_row(output=[3, 4], seed=42, temperature=1.0)
    alone = token(logits[2], row)
    for seeds in ([1, 2, 3, 4], [0, 0, 0, 0]):
        others = [make_row(output=[3], seed=seed, temperature=1.2, request_id=f"n{seed}") for seed in seeds]
        batch = [*others[:2], row, *others[2:]]
        assert sample(logits, *batch)[2].token_id == alone
    moved = torch.cat([logits[2:3], logits[:2]])
    assert sample(moved, row, make_row(), make_row(temperature=0.7, request_id="x"))[0].token_id == alone


def test_sm_01_draws_do_not_touch_the_global_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    sample(make_logits(1), make_row(temperature=1.0))
    assert torch.equal(torch.rand(1), expected)


def test_seed_and_output_position_both_change_the_draw() -> None:
    logits = torch.zeros(VOCAB)
    by_seed = {token(logits, make_row(seed=seed, temperature=1.0)) for seed in range(20)}
    by_position = {token(logits, make_row(output=[1] * n, temperature=1.0)) for n in range(20)}
    by_prompt = {token(logits, make_row(prompt=[1] * n, temperature=1.0)) for n in range(1, 20)}
    assert len(by_seed) > 10
    assert len(by_position) > 10
    assert len(by_prompt) == 1


def test_sm_04_extreme_parameters_in_one_batch_leave_neighbours_alone() -> None:
    extremes = [
        make_row(temperature=t, top_p=p, top_k=k, min_p=m, request_id=f"{t}/{p}/{k}/{m}")
        for t in (0.0, 1e-8, 1e-4, 2.0, 100.0)
        for p in (1e-9, 1.0)
        for k in (-1, 0, 1, VOCAB, VOCAB + 5)
        for m in (0.0, 1.0)
    ]
    logits = make_logits(len(extremes) + 1) * 20
    neighbour = make_row(seed=9, temperature=0.9, request_id="neighbour")
    results = sample(logits, *extremes, neighbour)
    assert all(result.token_id is not None for result in results)
    assert results[-1].token_id == token(logits[-1], neighbour)
    for row, result, best in zip(extremes, results, logits.argmax(-1).tolist(), strict=False):
        if row.sampling.temperature <= 1e-4 or row.sampling.top_p < 1 or row.sampling.top_k == 1:
            assert result.token_id == best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_a_hundred_forces_and_of_minus_a_hundred_bans(temperature: float) -> None:
    logits = make_logits(1)[0]
    best = int(logits.argmax())
    logits[best] += 150
    assert token(logits, make_row(temperature=temperature, logit_bias={best: -100.0})) != best
    forced = (best + 1) % VOCAB
    logits[best] -= 150
    assert token(logits, make_row(temperature=temperature, logit_bias={forced: 100.0})) == forced


@pytest.mark.parametrize("bias", [-100.0, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sm_06_a_row_without_any_possible_token_says_so_and_others_go_on(bias: float, temperature: float) -> None:
    logits = make_logits(4)
    rows = [make_row(request_id=str(i), temperature=temperature) for i in range(4)]
    banned = make_row(request_id="2", temperature=temperature, logit_bias=dict.fromkeys(range(VOCAB), bias))
    results = sample(logits, *rows[:2], banned, rows[3])
    assert (results[2].token_id, results[2].exhausted) == (None, True)
    expected = [s.token_id for s in sample(logits, *rows)]
    assert [results[i].token_id for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_sm_06_logits_that_are_not_finite_end_their_own_row_only(broken: float) -> None:
    logits = make_logits(3)
    logits[1, 100] = broken
    results = sample(logits, *[make_row(request_id=str(i), temperature=1.0, top_p=0.9, logprobs=1) for i in range(3)])
    assert [result.token_id is None for result in results] == [False, True, False]
    assert not any(result.exhausted for result in results), "the model is to blame, not the request"
    assert results[1].logprobs is None
    assert results[0].logprobs is not None


def test_stop_tokens_cannot_come_before_the_minimum_length() -> None:
    logits = torch.zeros(VOCAB)
    logits[[7, 8]] = torch.tensor([50.0, 40.0])
    early: dict[str, Any] = {"stop": {7, 8}, "min_tokens": 3}
    assert token(logits, make_row(output=[1, 1], **early)) not in {7, 8}
    assert token(logits, make_row(output=[1, 1, 1], **early)) == 7
    assert token(logits, make_row(output=[1, 1], logit_bias={7: 100.0}, **early)) not in {7, 8}


def test_logprobs_are_the_models_own_before_anything_is_adjusted() -> None:
    logits = make_logits(3)
    expected = logits.double().log_softmax(-1)
    rows = [
        make_row(request_id="a", logprobs=3, logit_bias={5: 100.0}, repetition_penalty=1.5),
        make_row(request_id="b"),
        make_row(request_id="c", logprobs=0, temperature=2.0, top_k=3),
    ]
    first, second, third = sample(logits, *rows)
    assert first.token_id == 5
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(float(expected[0, 5]), abs=1e-5)
    best = expected[0].topk(3)
    assert [t for t, _ in first.logprobs.top] == best.indices.tolist()
    assert [v for _, v in first.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert second.logprobs is None
    assert third.logprobs is not None
    assert third.logprobs.top == ()
    assert third.logprobs.logprob == pytest.approx(float(expected[2, third.token_id]), abs=1e-5)


def test_logprobs_are_finite_even_where_the_model_rules_tokens_out() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 3] = 0.0
    (result,) = sample(logits, make_row(logprobs=2))
    assert result.logprobs is not None
    assert result.logprobs.top[0] == (3, 0.0)
    assert result.logprobs.top[1][1] == -9999.0


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    (result,) = sample(make_logits(1), make_row(logprobs=VOCAB + 10))
    assert result.logprobs is not None
    assert len(result.logprobs.top) == VOCAB
