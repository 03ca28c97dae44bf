"""How long a step will take, learned from the steps so far. Holds no clock: whoever runs a step says how long it took.

In: shapes of steps and their times. Out: predictions. A linear model with non-negative coefficients, fitted to the
median time of each kind of step, so that neither one slow step nor a thousand equal ones spoil it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepCost", "StepShape"]

_SMALL_STEP = 16
"""Tokens up to which a step may be bound by reading the weights: beyond, each token may cost more."""
_KINDS = 64
"""Kinds of steps remembered; the one not seen for longest goes."""
_TIMES = 5
"""Last times kept of each kind; their median counts."""
_REFIT_EVERY = 32
_DRIFT_RATE = 0.1
_DRIFT_LIMITS = (0.5, 2.0)
_LEAST_TRUSTED = 64
_TOLERANCE = 0.1
"""Relative error of a kind up to which it is believed in full."""
_REWEIGHTINGS = 3
_RIDGE = np.array([1.0, 1.0, 1.0, 30.0, 30.0, 30.0]) * 1e-3
"""How firmly each coefficient stays where it is as long as the steps seen do not tell it from others: what may be due
to the number of tokens is not put down to attention, which grows with the square of a chunk."""


@dataclass(slots=True)
class StepShape:
    """What the time of a step depends on; grows while the step is planned."""

    tokens: int = 0
    samples: int = 0
    """Rows whose logits are computed."""
    context: int = 0
    """Positions that rows of one token attend to, summed."""
    pairs: int = 0
    """(query, key) pairs of the longer rows."""

    def add(self, start: int, count: int, samples: bool) -> None:
        """A row that computes positions start … start + count - 1."""
        self.tokens += count
        self.samples += samples
        if count == 1:
            self.context += start + 1
        else:
            self.pairs += count * start + count * (count + 1) // 2

    def plus(self, start: int, count: int, samples: bool) -> StepShape:
        """This shape with one row more."""
        shape = StepShape(self.tokens, self.samples, self.context, self.pairs)
        shape.add(start, count, samples)
        return shape

    def copy(self) -> StepShape:
        return StepShape(self.tokens, self.samples, self.context, self.pairs)

    @property
    def features(self) -> tuple[float, ...]:
        """Of the linear model, each about 1 for a large step."""
        return (
            1.0,
            self.tokens / 64,
            max(self.tokens - _SMALL_STEP, 0) / 64,
            self.samples / 64,
            self.context / 16_384,
            self.pairs / 131_072,
        )

    @property
    def kind(self) -> tuple[int, ...]:
        """Steps of one kind differ by less than a factor of two in each number."""
        return tuple(n.bit_length() for n in (self.tokens, self.samples, self.context >> 8, self.pairs >> 8))


class StepCost:
    """Predicts seconds. Knows nothing until the first `learn`."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[int, ...], deque[tuple[float, tuple[float, ...]]]] = OrderedDict()
        self._coefficients = [0.0] * len(StepShape().features)
        self._drift = 1.0
        self._num_learned = 0
        self._largest = 0

    @property
    def known(self) -> bool:
        return self._num_learned > 0

    @property
    def trusted_tokens(self) -> int:
        """Larger steps are too far from what was seen to be predicted."""
        return max(_LEAST_TRUSTED, 2 * self._largest)

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape will take; 0 before anything was learned."""
        return self._drift * self._fitted(shape.features)

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long (> 0)."""
        features = shape.features
        low, high = _DRIFT_LIMITS
        if (expected := self._fitted(features)) > 0:
            self._drift += _DRIFT_RATE * (min(max(seconds / expected, low), high) - self._drift)
        times = self._kinds.setdefault(shape.kind, deque(maxlen=_TIMES))
        times.append((seconds, features))
        self._kinds.move_to_end(shape.kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        self._largest = max(self._largest, shape.tokens)
        self._num_learned += 1
        # Early on every step is news; later a fit now and then keeps up with what changes.
        if len(times) < _TIMES or self._num_learned % _REFIT_EVERY == 0:
            self._fit()
            # What the coefficients have taken in is no drift any more.
            if len(times) == 1:
                self._drift = 1.0  # the miss was ignorance of this kind
            elif expected > 0 and (fitted := self._fitted(features)) > 0:
                self._drift = min(max(self._drift * expected / fitted, low), high)

    def _fitted(self, features: tuple[float, ...]) -> float:
        return sum(map(float.__mul__, self._coefficients, features))

    def _fit(self) -> None:
        """Least squares under non-negative coefficients.

        An error is relative to what was measured or predicted, whichever is more. A kind counts as often as it was
        seen, up to `_TIMES`; one that the others contradict pulls no harder than one which is `_TOLERANCE` off
        (Huber's weights): a first touch of memory, another program, a step that had nothing to do. The first of the
        weighted solutions goes by absolute errors below the median: short steps cannot make themselves the yardstick.
        """
        medians = [sorted(times)[len(times) // 2] for times in self._kinds.values()]
        seconds = np.array([seconds for seconds, _ in medians])
        features = np.array([features for _, features in medians])
        seen = np.array([len(times) for times in self._kinds.values()]) / _TIMES
        if not any(self._coefficients):
            self._coefficients[0] = float(np.median(seconds))  # until there is more, any step takes as long
        last = np.array(self._coefficients)
        scale, belief = np.maximum(seconds, np.median(seconds)), np.ones_like(seconds)
        for _ in range(_REWEIGHTINGS):
            weights = seen * belief / scale**2
            gram = features.T @ (weights[:, None] * features)
            self._coefficients = _solve(gram, features.T @ (weights * seconds), last)
            predicted = features @ np.array(self._coefficients)
            scale = np.maximum(seconds, predicted)
            belief = np.minimum(1.0, _TOLERANCE / np.maximum(np.abs(predicted - seconds) / scale, 1e-9))


def _solve(gram: NDArray[np.float64], target: NDArray[np.float64], last: NDArray[np.float64]) -> list[float]:
    """Non-negative x with gram @ x about target; what that leaves open, or was never seen, stays as in `last`.

    Leaves out whatever would be negative, the worst first: at most one solution of six unknowns for each.
    """
    ridge = _RIDGE * gram.diagonal()
    target = target + ridge * last
    gram = gram + np.diag(ridge)
    values = last.copy()
    used = np.flatnonzero(ridge > 0)
    values[used] = 0.0
    while used.size:
        solution = np.linalg.solve(gram[np.ix_(used, used)], target[used])
        worst = int(solution.argmin())
        if solution[worst] >= 0:
            values[used] = solution
            break
        used = np.delete(used, worst)
    return [float(value) for value in values]
