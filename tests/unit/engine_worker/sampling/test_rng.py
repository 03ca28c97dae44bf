"""Random numbers: published vectors, uniformity, and independence of everything but (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest

from engine_worker.sampling.rng import mix64, uniform
from shared.params import choice_seed

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def splitmix64_mix(state: int) -> int:
    """The reference code in Python's own integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_the_mixer_gives_the_published_numbers_of_splitmix64() -> None:
    states = np.array([(1234567 + i * GOLDEN) & MASK for i in range(1, 6)], dtype=np.uint64)
    assert mix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63, MASK])
def test_the_numbers_are_those_of_plain_integer_arithmetic(seed: int) -> None:
    positions = [0, 1, 2, 1000, 2**31]
    expected = [
        (splitmix64_mix((splitmix64_mix((seed + GOLDEN) & MASK) + (p + 1) * GOLDEN) & MASK) >> 11) * 2.0**-53
        for p in positions
    ]
    assert uniform([seed] * len(positions), positions)[:, 0].tolist() == expected
    for place, (p, number) in enumerate(
        zip(positions, uniform([seed] * len(positions), positions, 3).tolist(), strict=True)
    ):
        state = splitmix64_mix((splitmix64_mix((seed + GOLDEN) & MASK) + (p + 1) * GOLDEN) & MASK)
        further = [(splitmix64_mix((state + k * GOLDEN) & MASK) >> 11) * 2.0**-53 for k in (1, 2)]
        assert number == [expected[place], *further]


def test_a_number_depends_on_its_own_seed_and_position_only() -> None:
    alone = uniform([7], [3], 4)[0]
    batch = uniform([1, 7, 7, 99], [3, 4, 3, 0], 4)
    assert batch[2].tolist() == alone.tolist()
    assert len(set(batch.ravel().tolist())) == 16


def chi_square_of_uniform(numbers: np.ndarray, bins: int = 64) -> float:
    observed, _ = np.histogram(numbers, bins=bins, range=(0.0, 1.0))
    expected = len(numbers) / bins
    return float(((observed - expected) ** 2 / expected).sum())


# 63 degrees of freedom: mean 63, standard deviation 11.2; beyond 120 one run in 100,000.
@pytest.mark.parametrize("seeds", ["one seed", "many seeds", "choices", "of one draw"])
def test_numbers_are_uniform_along_positions_seeds_and_choices(seeds: str) -> None:
    count = 20_000
    numbers = {
        "one seed": lambda: uniform([5] * count, range(count)),
        "many seeds": lambda: uniform(range(count), [0] * count),
        "choices": lambda: uniform([choice_seed(5, i) for i in range(count)], [0] * count),
        "of one draw": lambda: uniform([5], [9], count),
    }[seeds]().ravel()
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert chi_square_of_uniform(numbers) < 120


def test_choices_of_a_request_do_not_share_their_sequences() -> None:
    first = uniform([choice_seed(9, 0)] * 100, range(100))[:, 0]
    second = uniform([choice_seed(9, 1)] * 100, range(100))[:, 0]
    assert not set(first.tolist()) & set(second.tolist())
    assert abs(np.corrcoef(first[1:], second[:-1])[0, 1]) < 0.4
