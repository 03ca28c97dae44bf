"""How much may go into a step: what keeps running streams flowing, and what batch work may add beside interactive work.

In: predicted and measured times of steps. Out: how many tokens of a row fit. Three limits on a step's predicted time:

- With decodes in it: the target inter-token latency, or without one 100 ms, or twice what the decodes take alone.
- Prefill alone: 250 ms, so that whoever arrives waits no longer.
- Batch rows beside interactive ones: 5 % on top of the interactive rows alone, or the target where that is more. What
  stays unused of it is saved up and may be spent in one step of 25, so that batch work never stands still.
"""

from __future__ import annotations

from engine_worker.scheduling.cost import StepCost, StepShape

__all__ = ["BATCH_SHARE", "BURST_EVERY", "FLOOR_TOKENS", "Pace"]

FLOOR_TOKENS = 16
"""Of prompts, in a step, whatever its limit: a prompt always gets on."""
BATCH_SHARE = 0.05
"""Of the time of interactive rows, which batch rows may add to a step."""
BURST_EVERY = 25
"""Steps from one in which batch rows may use what they saved to the next: 4 %, out of sight of a 95th percentile."""
_STEP_S = 0.1
_STRETCH = 2.0
_PREFILL_STEP_S = 0.25
_MAX_SAVED_S = 0.25
_NEAR = 0.95
"""A step of mean length `_NEAR` times the target mostly stays below it."""


class Pace:
    """Owned by the scheduler; `learn` once per step, the rest while a step is planned.

    target_itl_s: wanted time between two tokens of a running stream, 0 for none.
    """

    def __init__(self, target_itl_s: float = 0.0) -> None:
        self._target = _NEAR * target_itl_s
        self._cost = StepCost()
        self._saved = 0.0
        self._since_burst = 0

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        if seconds > 0:
            self._cost.learn(shape, seconds)

    def limit(self, decodes: StepShape) -> float:
        """Seconds that prompts may stretch a step to in which these rows generate tokens."""
        if not decodes.tokens:
            return _PREFILL_STEP_S
        return self._target or max(_STEP_S, _STRETCH * self._cost.predict(decodes))

    def batch_limit(self, interactive: StepShape) -> float:
        """Seconds that batch rows may stretch a step to which already holds these interactive rows."""
        limit = max(self._target, (1 + BATCH_SHARE) * self._cost.predict(interactive))
        return limit + (self._saved if self._since_burst >= BURST_EVERY else 0.0)

    def settle(self, interactive: StepShape, whole: StepShape) -> None:
        """A step was planned in which batch rows had to make do with what interactive rows left."""
        before = self._saved
        used = self._cost.predict(whole) - self._cost.predict(interactive)
        allowed = BATCH_SHARE * self._cost.predict(interactive)
        self._saved = min(max(before + allowed - used, 0.0), _MAX_SAVED_S)
        self._since_burst = 0 if used > allowed and self._since_burst >= BURST_EVERY else self._since_burst + 1

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
