"""Seeded sampling, penalties and limits: the same tokens in any company and after any interruption."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine_worker.engine import Engine
from engine_worker.models.base import LoadedModel
from engine_worker.request import Request
from tests.support.engines import EngineRun, engine_for
from tests.support.requests import make_request

SEEDED: Mapping[str, Any] = {"seed": 2**63 + 9, "temperature": 1.0, "top_p": 0.97}


def make_seeded(**changes: Any) -> Request:
    return make_request(9, 20, **{**SEEDED, **changes})


def preempt(engine: Engine, request: Request) -> None:
    """As if blocks had run out just now."""
    engine._scheduler._preempt(request)


@pytest.fixture(scope="module")
def alone(tiny: LoadedModel) -> list[int]:
    run, request = EngineRun(engine_for(tiny)), make_seeded()
    run.add(request)
    return run.finish().tokens(request)


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("neighbour", [{"seed": 1}, {"temperature": 0.0}, {"top_k": 5, "seed": 3}])
def test_sm_01_in_a_batch(tiny: LoadedModel, alone: list[int], place: int, neighbour: dict[str, Any]) -> None:
    run = EngineRun(engine_for(tiny, max_num_batched_tokens=40))
    request = make_seeded()
    others = [make_request([n + 5] * (n + 3), 15, **({"temperature": 1.2} | neighbour)) for n in range(6)]
    run.add(*others[:place], request, *others[place:])
    assert run.finish().tokens(request) == alone


@pytest.mark.parametrize("at", [1, 7, 16])
def test_sm_01_after_a_preemption(tiny: LoadedModel, alone: list[int], at: int) -> None:
    run, request = EngineRun(engine_for(tiny)), make_seeded()
    run.add(request)
    for _ in range(at):
        run.step()
    preempt(run.engine, request)
    assert run.finish().tokens(request) == alone
    assert request.num_preemptions == 1


@pytest.mark.parametrize("logged", [1, 8, 19])
def test_sm_01_after_a_take_over(tiny: LoadedModel, alone: list[int], logged: int) -> None:
    run, request = EngineRun(engine_for(tiny)), make_seeded(output=alone[:logged])
    run.add(request)
    assert run.finish().tokens(request) == alone[logged:]


def test_other_seeds_draw_other_tokens(tiny: LoadedModel, alone: list[int]) -> None:
    run = EngineRun(engine_for(tiny))
    others = [make_seeded(seed=seed) for seed in range(5)]
    run.add(*others)
    run.finish()
    assert len({tuple(run.tokens(request)) for request in others} | {tuple(alone)}) == 6


@pytest.mark.parametrize("at", [1, 7, 9])
def test_sc_03_penalties_and_limits_survive_preemption(tiny: LoadedModel, at: int) -> None:
    """Minimum length and stop tokens are held against runs alone in test_engine_exactness.py."""
    params: dict[str, Any] = {"presence_penalty": 0.8, "frequency_penalty": 0.3}
    whole, interrupted = make_request(9, 14, **params), make_request(9, 14, **params)
    for request in (whole, interrupted):
        run = EngineRun(engine_for(tiny))
        run.add(request)
        while run.engine.has_work:
            if request is interrupted and len(request.output_token_ids) == at and not request.num_preemptions:
                preempt(run.engine, request)
            run.step()
    assert interrupted.num_preemptions == 1
    assert len(whole.output_token_ids) == 14
    assert interrupted.output_token_ids == whole.output_token_ids
    assert len(interrupted.prompt_token_ids) == 9
