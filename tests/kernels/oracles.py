"""Independent implementations for kernel tests: loops over tokens and heads in float64, no code shared with the
kernels."""

from __future__ import annotations

import math

import torch

__all__ = ["attend", "rms_norm", "rotate_pairs"]


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """query [Q, heads, D] at `positions`, keys and values [L, kv_heads, D] in order of position -> float64 [Q, heads,
    D]."""
    heads, kv_heads, dim = query.shape[1], keys.shape[1], query.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row, position in enumerate(positions):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            seen = keys[: position + 1, shared].double()
            weights = torch.softmax(seen @ query[row, head].double() / math.sqrt(dim), dim=0)
            out[row, head] = weights @ values[: position + 1, shared].double()
    return out


def rotate_pairs(x: torch.Tensor, positions: list[int], theta: float, rotary_dim: int) -> torch.Tensor:
    """x [T, heads, D]: the pair (i, i + rotary_dim / 2) is a complex number turned by position * theta^(-2i /
    rotary_dim)."""
    out = x.double().clone()
    half = rotary_dim // 2
    for token, position in enumerate(positions):
        for i in range(half):
            angle = position * theta ** (-2 * i / rotary_dim)
            turn = complex(math.cos(angle), math.sin(angle))
            for head in range(x.shape[1]):
                pair = complex(float(x[token, head, i]), float(x[token, head, i + half])) * turn
                out[token, head, i], out[token, head, i + half] = pair.real, pair.imag
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float64."""
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()
