"""Rotary position embedding: configuration and the table of angles, with the long-context variants checkpoints ask
for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import RopeTable

__all__ = ["ROPE_KINDS", "RopeConfig", "rope_table"]

ROPE_KINDS = ("default", "linear", "dynamic", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Angles of position p: p * inverse frequency, in float32. Fields a kind lacks keep their neutral value."""

    theta: float
    rotary_dim: int
    """Features of a head that rotate; even."""
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    """Positions the unscaled model was trained for ("dynamic", "llama3")."""
    frequency_divisors: tuple[float, ...] = ()
    """Per frequency, where a GGUF file carries its scaling as a finished tensor."""


def rope_table(config: RopeConfig, max_positions: int, device: torch.device) -> RopeTable:
    """cos and sin of positions 0 … max_positions - 1, float32 [max_positions, rotary_dim / 2]."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config, max_positions))
    return RopeTable(angles.cos().to(device), angles.sin().to(device))


def inverse_frequencies(config: RopeConfig, max_positions: int) -> Tensor:
    """float32 [rotary_dim / 2].

    "dynamic" (NTK-aware) stretches theta by the length in use; a paged cache keeps keys rotated as they were written,
    so the length is fixed here to the window being served instead of growing with each sequence.
    """
    theta = config.theta
    if config.kind == "dynamic" and max_positions > config.original_max_position:
        stretch = config.factor * max_positions / config.original_max_position - (config.factor - 1)
        theta *= stretch ** (config.rotary_dim / (config.rotary_dim - 2))
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies = 1.0 / theta**exponents
    if config.kind == "linear":
        frequencies = frequencies / config.factor
    elif config.kind == "llama3":
        frequencies = _llama3(frequencies, config)
    if config.frequency_divisors:
        frequencies = frequencies / torch.tensor(config.frequency_divisors)
    return frequencies


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long waves divided by `factor`, short ones kept, a smooth step between the two."""
    turns = config.original_max_position * frequencies / (2 * math.pi)
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / config.factor + smooth * frequencies
