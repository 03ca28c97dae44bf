"""Predicted step times against machines whose times are known exactly."""

from __future__ import annotations

import random

import pytest

from engine_worker.scheduling.cost import StepCost, StepShape


def cpu(shape: StepShape) -> float:
    """Weights are read in 7 ms, beyond 13 tokens arithmetic counts; attention by positions and by pairs."""
    return max(7e-3, 5.5e-4 * shape.tokens) + 2e-4 * shape.samples + 9e-7 * shape.context + 3e-7 * shape.pairs


def accelerator(shape: StepShape) -> float:
    return 4e-3 + 2e-5 * shape.tokens + 1e-8 * shape.context + 1e-9 * shape.pairs


def make_shape(rng: random.Random, prefill: bool) -> StepShape:
    shape = StepShape()
    for _ in range(rng.choice([1, 4, 8, 30])):
        shape.add(rng.randint(20, 900), 1, samples=True)
    if prefill:
        shape.add(rng.choice([0, 500, 1000, 3000]), rng.choice([50, 100, 300, 500]), samples=False)
    return shape


@pytest.mark.parametrize("machine", [cpu, accelerator])
def test_after_a_while_predictions_are_near_the_truth_although_some_steps_are_slow(machine) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(1)
    cost = StepCost()
    for number in range(400):
        shape = make_shape(rng, prefill=number % 3 == 0)
        hiccup = 4.0 if rng.random() < 0.05 else 1.0
        cost.learn(shape, machine(shape) * rng.uniform(0.97, 1.03) * hiccup)
    for number in range(100):
        shape = make_shape(rng, prefill=number % 2 == 0)
        assert cost.predict(shape) == pytest.approx(machine(shape), rel=0.35)


@pytest.mark.parametrize("odd_s", [0.4, 0.065, 0.0004])
def test_a_few_odd_steps_of_kinds_that_never_come_back_do_not_make_rows_look_dear(odd_s: float) -> None:
    """First touches of memory, or steps that had nothing to do, on a machine that takes 40 ms for anything."""
    rng = random.Random(5)
    cost = StepCost()
    for prompts in (1, 2):
        odd = StepShape()
        for _ in range(prompts):
            odd.add(0, 64, samples=True)
        cost.learn(odd, odd_s)
    for number in range(300):
        shape = StepShape()
        for _ in range(rng.randint(3, 16)):
            shape.add(rng.randint(64, 96), 1, samples=True)
        if number % 3 == 0:
            shape.add(0, 64, samples=True)
        cost.learn(shape, rng.uniform(0.040, 0.042))
    few, many = StepShape(), StepShape()
    few.add(80, 1, samples=True)
    for _ in range(16):
        many.add(80, 1, samples=True)
    many.add(0, 64, samples=True)
    assert cost.predict(few) == pytest.approx(0.041, rel=0.05)
    assert cost.predict(many) == pytest.approx(0.041, rel=0.05)


def test_nothing_is_known_before_the_first_step() -> None:
    cost = StepCost()
    assert not cost.known
    assert cost.predict(StepShape(tokens=5)) == 0.0


def test_a_machine_that_becomes_twice_as_slow_is_noticed_within_some_tens_of_steps() -> None:
    cost, shape = StepCost(), StepShape(tokens=8, samples=8, context=800)
    for _ in range(100):
        cost.learn(shape, 0.01)
    assert cost.predict(shape) == pytest.approx(0.01, rel=0.02)
    for _ in range(40):
        cost.learn(shape, 0.02)
    assert cost.predict(shape) == pytest.approx(0.02, rel=0.2)


def test_a_thousand_equal_steps_do_not_wash_out_what_others_cost() -> None:
    cost = StepCost()
    big, small = StepShape(tokens=400, pairs=80_000), StepShape(tokens=4, samples=4, context=400)
    for _ in range(5):
        cost.learn(big, cpu(big))
    for _ in range(1000):
        cost.learn(small, cpu(small))
    assert cost.predict(big) == pytest.approx(cpu(big), rel=0.1)


def test_a_longer_step_is_never_predicted_to_be_shorter() -> None:
    rng = random.Random(2)
    cost = StepCost()
    for _ in range(50):
        cost.learn(make_shape(rng, prefill=rng.random() < 0.5), rng.uniform(0.001, 1.0))
        shape = make_shape(rng, prefill=True)
        assert cost.predict(shape) <= cost.predict(shape.plus(100, 50, samples=True))


def test_what_is_remembered_is_bounded() -> None:
    rng = random.Random(3)
    cost = StepCost()
    for _ in range(2000):
        cost.learn(StepShape(*(rng.randrange(1, 1 << rng.randrange(1, 20)) for _ in range(4))), 0.01)
    assert len(cost._kinds) <= 64


def test_far_larger_steps_than_any_seen_are_not_trusted() -> None:
    cost = StepCost()
    cost.learn(StepShape(tokens=1), 0.01)
    assert cost.trusted_tokens == 64
    cost.learn(StepShape(tokens=100), 0.05)
    assert cost.trusted_tokens == 200


def test_pairs_are_counted_as_causal_attention_does() -> None:
    shape = StepShape().plus(10, 3, samples=False)
    assert shape == StepShape(tokens=3, pairs=11 + 12 + 13)
    assert shape.plus(10, 1, samples=True) == StepShape(tokens=4, samples=1, context=11, pairs=36)
