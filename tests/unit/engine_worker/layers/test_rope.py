"""Inverse frequencies against transformers' own, for every rope variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_worker.layers.rope import RopeConfig, inverse_frequencies, rope_table

CPU = torch.device("cpu")


def transformers_frequencies(parameters: dict[str, Any], head_dim: int, positions: int, length: int) -> torch.Tensor:
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        rope_parameters=parameters,
    )
    kind = parameters["rope_type"]
    if kind == "default":
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        return rotary.inv_freq
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
    assert scale == 1.0
    return frequencies


@pytest.mark.parametrize(
    ("config", "parameters", "positions", "length"),
    [
        (RopeConfig(10000.0, 64), {"rope_type": "default", "rope_theta": 10000.0}, 2048, 2048),
        (
            RopeConfig(5e5, 128, "linear", 4.0),
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
            2048,
            8192,
        ),
        (
            RopeConfig(10000.0, 64, "dynamic", 4.0, original_max_position=512),
            {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            512,
            2048,
        ),
        (
            RopeConfig(10000.0, 64, "dynamic", 4.0, original_max_position=512),
            {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            512,
            300,
        ),
        (
            RopeConfig(5e5, 128, "llama3", 8.0, 1.0, 4.0, 8192),
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
            131072,
        ),
    ],
    ids=["default", "linear", "dynamic long", "dynamic short", "llama3"],
)
def test_frequencies_equal_transformers(
    config: RopeConfig, parameters: dict[str, Any], positions: int, length: int
) -> None:
    expected = transformers_frequencies(parameters, config.rotary_dim, positions, length)
    torch.testing.assert_close(inverse_frequencies(config, length), expected, rtol=1e-6, atol=0)


def test_divisors_of_a_file_are_applied_per_frequency() -> None:
    plain = inverse_frequencies(RopeConfig(10000.0, 8), 16)
    divided = inverse_frequencies(RopeConfig(10000.0, 8, frequency_divisors=(1.0, 2.0, 4.0, 8.0)), 16)
    assert (plain / divided).tolist() == pytest.approx([1, 2, 4, 8])


def test_table_is_float32_and_right_at_far_positions() -> None:
    table = rope_table(RopeConfig(100000.0, 64), 8192, CPU)
    assert table.cos.shape == table.sin.shape == (8192, 32)
    assert table.cos.dtype is torch.float32
    exact = torch.outer(torch.tensor([8191.0]).double(), 1 / 100000.0 ** (torch.arange(0, 64, 2).double() / 64))
    torch.testing.assert_close(table.cos[8191:].double(), exact.cos(), rtol=0, atol=2e-3)
