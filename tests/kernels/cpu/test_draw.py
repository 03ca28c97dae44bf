"""Drawing by the native kernels, at every CPU level: the reference's tokens, whatever the batch, threads and filters.

Softmax and filters themselves are held against textbook ones in tests/unit/engine_worker/sampling/test_draw.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels.cpu.native import NativeOps
from kernels.draws import LEVELS, Draws, padded
from kernels.interface import Ops
from kernels.reference import ReferenceOps

FILTERS = [
    (0, 1.0, 0.0),
    (0, 0.95, 0.0),
    (50, 1.0, 0.0),
    (50, 0.95, 0.0),
    (700, 0.6, 0.0),
    (5, 0.9, 0.2),
    (0, 1.0, 0.05),
    (0, 0.3, 0.001),
    (10**6, 0.999, 0.0),
]


def _draws(rows: int, filters: Sequence[tuple[int, float, float]], temperature: float, seed: int = 0) -> Draws:
    chosen = [filters[i % len(filters)] for i in range(rows)]
    return Draws(
        np.full(rows, temperature, np.float32),
        np.array([k for k, _, _ in chosen], np.int64),
        np.array([p for _, p, _ in chosen], np.float64),
        np.array([m for _, _, m in chosen], np.float64),
        np.random.default_rng(seed).random((rows, LEVELS)),
    )


def _draw(ops: Ops, logits: torch.Tensor, by: Draws) -> list[int]:
    scratch = torch.full((len(logits), padded(logits.shape[1])), float("nan"))
    return ops.draw(logits, logits.max(-1).values, by, scratch)


def _logits(rows: int, words: int, spread: float) -> torch.Tensor:
    return torch.randn(rows, words, generator=torch.Generator().manual_seed(words)) * spread


@pytest.mark.parametrize("words", [1, 31, 255, 256, 257, 1500, 4096, 49_152])
@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_tokens_are_the_references(native: NativeOps, words: int, spread: float) -> None:
    rows = 54 if words > 5000 else 270
    logits = _logits(rows, words, spread)
    logits[::7, ::3] = -torch.inf
    logits[:, words // 2] = logits[:, words // 2].clamp(min=0.0)
    for temperature in (1.0, 0.8):
        by = _draws(rows, FILTERS, temperature)
        got, expected = _draw(native, logits, by), _draw(ReferenceOps(), logits, by)
        # Exponentials differ in their last bits: a draw hangs on them once in a hundred thousand, an error in most.
        assert sum(one != other for one, other in zip(got, expected, strict=True)) <= 1
        assert all(torch.isfinite(logits[i, token]) for i, token in enumerate(got))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_nothing_is_drawn_that_a_full_sort_rules_out(native: NativeOps, top_k: int, top_p: float, min_p: float) -> None:
    logits = _logits(1, 3000, 2.0)
    weights = ((logits[0].double() - logits.max()) / 0.7).exp()
    order = weights.argsort(descending=True)[: top_k if 0 < top_k < 3000 else None]
    before = weights[order].cumsum(0) - weights[order]
    kept = order[(before < top_p * weights[order].sum()) & (weights[order] >= min_p)]
    by = _draws(4000, [(top_k, top_p, min_p)], 0.7, seed=3)
    counts = np.bincount(_draw(native, logits.expand(4000, -1).contiguous(), by), minlength=3000)
    assert set(counts.nonzero()[0]) <= set(kept.tolist())
    # The twenty best each, the others together. 20 degrees of freedom: 45.3 is exceeded in one run of 1,000.
    shares = (weights[kept] / weights[kept].sum()).numpy()
    best, rest = kept[:20].tolist(), kept[20:].tolist()
    seen = np.array([*counts[best], counts[rest].sum()][: len(best) + bool(rest)])
    due = np.array([*shares[:20], shares[20:].sum()][: len(seen)]) * 4000
    assert float(((seen - due) ** 2 / due).sum()) < 45.3


def test_a_row_draws_the_same_alone_and_in_any_batch(native: NativeOps) -> None:
    logits, by = _logits(36, 2000, 1.0), _draws(36, FILTERS, 0.9)
    together = _draw(native, logits, by)
    for i in range(36):
        one = Draws(*(column[i : i + 1] for column in by))
        assert _draw(native, logits[i : i + 1], one) == together[i : i + 1]


def test_the_edges_of_the_random_numbers(native: NativeOps) -> None:
    logits = torch.full((2, 600), -torch.inf)
    logits[:, [3, 299, 511]] = torch.tensor([0.0, 0.0, 0.0])
    by = _draws(2, [(0, 1.0, 0.0)], 1.0)._replace(unit=np.array([[0.0] * LEVELS, [np.nextafter(1.0, 0.0)] * LEVELS]))
    assert _draw(native, logits, by) == [3, 511]


def test_tokens_of_equal_weight_stay_together(native: NativeOps) -> None:
    logits = torch.zeros(500, 300)
    logits[:, 200:] = -1.0
    drawn = set(_draw(native, logits, _draws(500, [(10, 0.5, 0.0)], 1.0)))
    assert drawn <= set(range(200))
    assert len(drawn) > 100


def test_arguments_of_another_shape_are_refused(native: NativeOps) -> None:
    logits, by = _logits(3, 600, 1.0), _draws(3, FILTERS, 1.0)
    with pytest.raises(ValueError, match="each of 3 rows"):
        _draw(native, logits, by._replace(top_p=by.top_p[:2]))
    with pytest.raises(ValueError, match="expected"):
        native.draw(logits, logits.max(-1).values, by, torch.empty(3, 600))
