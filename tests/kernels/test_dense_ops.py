"""Norms, linears, activations, embedding, logits: each against a plain float64 computation."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import Ops
from tests.kernels.oracles import rms_norm

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 1e-2)}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
SHAPES = pytest.mark.parametrize(("tokens", "features"), [(1, 8), (3, 576), (65, 40)])


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCE[dtype]
    assert out.dtype is dtype
    torch.testing.assert_close(out.cpu().double(), expected.cpu().double(), rtol=rtol, atol=atol)


@DTYPES
@SHAPES
def test_rms_norm(backend: tuple[Ops, str], dtype: torch.dtype, tokens: int, features: int) -> None:
    ops, device = backend
    x = (torch.randn(tokens, features, device=device) * 30).to(dtype)
    weight = torch.randn(features, device=device).to(dtype)
    close(ops.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5), dtype)


@DTYPES
def test_rms_norm_of_zeros_is_zero(backend: tuple[Ops, str], dtype: torch.dtype) -> None:
    ops, device = backend
    x = torch.zeros(2, 16, dtype=dtype, device=device)
    assert torch.equal(ops.rms_norm(x, torch.ones_like(x[0]), 1e-6), x)


@DTYPES
def test_add_rms_norm_keeps_the_stream_in_float32(backend: tuple[Ops, str], dtype: torch.dtype) -> None:
    ops, device = backend
    x, residual = torch.randn(5, 32, device=device).to(dtype), torch.randn(5, 32, device=device)
    weight = torch.randn(32, device=device).to(dtype)
    total = (x.double() + residual.double()).float()
    normed, stream = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert (normed.dtype, stream.dtype) == (dtype, torch.float32)
    close(stream, total, torch.float32)
    close(normed, rms_norm(total, weight, 1e-5), dtype)
    normed, stream = ops.add_rms_norm(x.clone(), None, weight, 1e-5)
    assert torch.equal(stream, x.float())
    close(normed, rms_norm(x, weight, 1e-5), dtype)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 16, 24), (7, 576, 960), (33, 40, 3)])
def test_packed_linear(
    backend: tuple[Ops, str], dtype: torch.dtype, bias: bool, tokens: int, inputs: int, outputs: int
) -> None:
    ops, device = backend
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    shift = torch.randn(outputs, device=device).to(dtype) if bias else None
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    expected = x.double() @ weight.double().T + (shift.double() if shift is not None else 0)
    with torch.inference_mode():
        layer = ops.pack_linear(weight, shift)
        out = ops.linear(x, layer)
        logits = ops.logits(x, layer)
    assert (layer.in_features, layer.out_features) == (inputs, outputs)
    close(out, expected, dtype)
    assert logits.dtype is torch.float32
    close(logits.to(dtype), expected, dtype)


@DTYPES
def test_silu_and_mul(backend: tuple[Ops, str], dtype: torch.dtype) -> None:
    ops, device = backend
    gate_up = torch.randn(3, 20, device=device).to(dtype)
    gate, up = gate_up[:, :10].double(), gate_up[:, 10:].double()
    close(ops.silu_and_mul(gate_up), gate / (1 + torch.exp(-gate)) * up, dtype)


@DTYPES
def test_embedding_and_the_head_tied_to_it(backend: tuple[Ops, str], dtype: torch.dtype) -> None:
    ops, device = backend
    weight = torch.randn(19, 6, device=device).to(dtype)
    ids = torch.tensor([18, 0, 3, 3, *range(17)], device=device)
    table = ops.pack_embedding(weight.clone())
    assert torch.equal(ops.embedding(table, ids, dtype), torch.stack([weight[i] for i in ids]))
    hidden = torch.randn(3, 6, device=device).to(dtype)
    with torch.inference_mode():
        logits = ops.logits(hidden, ops.tied_head(table))
    close(logits.to(dtype), hidden.double() @ weight.double().T, dtype)
