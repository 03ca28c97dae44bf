"""What --simulate may say."""

from __future__ import annotations

import math
import re

import pytest

from shared.simulation import SIMULATION_KEYS, Simulation, parse_simulation


def test_every_part_is_taken() -> None:
    text = "tokens_per_s=5000, stream_tokens_per_s=12.5,ttft_ms=200,answer_tokens=64,seed=9"
    assert parse_simulation(text) == Simulation(5000.0, 12.5, 200.0, 64, 9)


def test_one_rate_is_enough_and_the_other_is_unbounded() -> None:
    assert parse_simulation("tokens_per_s=10") == Simulation(tokens_per_s=10.0)
    assert parse_simulation("stream_tokens_per_s=10").tokens_per_s == math.inf


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", "tokens_per_s=N"),
        ("5000", "tokens_per_s=N"),
        ("ttft_ms=5", "must name tokens_per_s=N, stream_tokens_per_s=N, or both"),
        ("tokens_per_s=5000,", "each once"),
        ("tokens_per_s=5,tokens_per_s=6", "each once"),
        ("tokens_per_s=5,speed=1", "'speed=1' in it is none of"),
        ("tokens_per_s=0", "a number from 0.1 to 1000000"),
        ("tokens_per_s=inf", "a number from 0.1 to 1000000"),
        ("tokens_per_s=nan", "a number from 0.1 to 1000000"),
        ("tokens_per_s=٣", "a number from 0.1 to 1000000"),
        ("tokens_per_s=5,ttft_ms=-1", "ttft_ms=-1 in it must be a number from 0 to 600000"),
        ("tokens_per_s=5,seed=1.5", "a whole number from 0"),
        ("tokens_per_s=5,answer_tokens=1e3", "a whole number from 0 to 1000000"),
    ],
)
def test_what_is_not_allowed_is_told_with_what_is(text: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=re.escape(allowed)) as refusal:
        parse_simulation(text)
    assert "each once" not in allowed or all(f"{key}=N" in str(refusal.value) for key in SIMULATION_KEYS)
