"""How much may go into a step: what keeps running streams flowing, and what batch work may add beside interactive work.

In: predicted and measured times of steps. Out: how many tokens of a row fit. Limits on a step's predicted time:

- With decodes in it: the target inter-token latency, or without one 100 ms (more where as many wait for their first
  token as run: up to 250 ms), or twice what the decodes take alone.
- Prefill alone: 250 ms, so that whoever arrives waits no longer.
- Batch rows beside interactive ones: 5 % on top of the interactive rows alone, or what the slowest quarter of
  interactive steps take without them, or the target, whichever is most. What stays unused of the 5 % is saved up; batch
  rows that found no room for 25 steps may spend it, so that they never stand still.
- Batch rows alone, while interactive requests come and go: about one such step, for the next one has to wait for it.
"""

from __future__ import annotations

from engine_worker.scheduling.cost import StepCost, StepShape
from engine_worker.scheduling.usual import Usual

__all__ = ["BATCH_SHARE", "BURST_EVERY", "FLOOR_TOKENS", "Pace"]

FLOOR_TOKENS = 16
"""Of prompts, in a step, whatever its limit: a prompt always gets on."""
BATCH_SHARE = 0.05
"""Of the time of interactive rows, which batch rows may add to a step."""
BURST_EVERY = 25
"""Steps without a batch row until one in which they may use what they saved: 4 %, out of sight of a 95th percentile."""
_STEP_S = 0.1
_CROWD = 2.0
"""Prompts per decode, halved, from which steps may take longer than `_STEP_S`: small chunks cost those who wait more
than large ones cost those who run, because every chunk reads the weights again."""
_STRETCH = 2.0
_PREFILL_STEP_S = 0.25
_MAX_SAVED_S = 0.25
_QUIET_S = 30.0
"""Seconds of steps without an interactive request after which none is expected."""
_ALONE_STRETCH = 1.25
"""What prompts may add to batch decodes while one is."""
_SHORT_S = 0.025
_NEAR = 0.95
"""A step of mean length `_NEAR` times the target mostly stays below it."""


class Pace:
    """Owned by the scheduler; `learn` once per step, the rest while a step is planned.

    target_itl_s: wanted time between two tokens of a running stream, 0 for none.
    """

    def __init__(self, target_itl_s: float = 0.0) -> None:
        self._target = _NEAR * target_itl_s
        self._cost = StepCost()
        self._usual = Usual()
        self._quiet_s = _QUIET_S
        self._saved = 0.0
        self._since_batch = 0

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        if seconds > 0:
            self._cost.learn(shape, seconds)
            self._quiet_s += seconds

    def limit(self, decodes: StepShape, prompts: int) -> float:
        """Seconds that so many prompts may stretch a step to in which these rows generate tokens."""
        if not decodes.tokens:
            return _PREFILL_STEP_S
        crowd = max(1.0, _CROWD * prompts / decodes.tokens)
        return self._target or max(min(crowd * _STEP_S, _PREFILL_STEP_S), _STRETCH * self._cost.predict(decodes))

    def limit_alone(self, decodes: StepShape, prompts: int) -> float:
        """The same for batch requests when no interactive one is there."""
        limit = self.limit(decodes, prompts)
        if self._quiet_s >= _QUIET_S:
            return limit
        short = max(self._target, self._usual.seconds, _SHORT_S, _ALONE_STRETCH * self._cost.predict(decodes))
        return min(limit, short)

    def saw_interactive(self, shape: StepShape, num_decodes: int) -> None:
        """A step was planned with these interactive rows, of which `num_decodes` generate tokens."""
        self._quiet_s = 0.0
        if num_decodes:
            self._usual.add(self._cost.predict(shape), num_decodes)

    def batch_limit(self, interactive: StepShape) -> float:
        """Seconds that batch rows may stretch a step to which already holds these interactive rows."""
        limit = max(self._target, (1 + BATCH_SHARE) * self._cost.predict(interactive), self._usual.seconds)
        return limit + (self._saved if self._since_batch >= BURST_EVERY else 0.0)

    def settle(self, interactive: StepShape, whole: StepShape) -> None:
        """A step was planned in which batch rows had to make do with what interactive rows left."""
        used = self._cost.predict(whole) - self._cost.predict(interactive)
        allowed = BATCH_SHARE * self._cost.predict(interactive)
        self._saved = min(max(self._saved + allowed - used, 0.0), _MAX_SAVED_S)
        self._since_batch = 0 if whole.tokens > interactive.tokens else self._since_batch + 1

    def fits(self, shape: StepShape, limit: float) -> bool:
        """Whether a step of this shape stays below the limit, as far as one knows: without any experience, yes."""
        cost = self._cost
        return not cost.known or (shape.tokens <= cost.trusted_tokens and cost.predict(shape) <= limit)

    def chunk(self, shape: StepShape, start: int, wanted: int, known: int, limit: float) -> int:
        """How many of the next `wanted` tokens from `start` fit beside `shape`, 0 to `wanted`.

        `known`: tokens of the request; computing the last one draws another.
        """
        low, high = 0, wanted
        if self.fits(shape.plus(start, high, start + high == known), limit):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(shape.plus(start, middle, samples=False), limit):
                low = middle
            else:
                high = middle
        return low
