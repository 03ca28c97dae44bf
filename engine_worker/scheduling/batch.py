"""One batch while it is being planned: what is left of the token budget, and the rows chosen so far."""

from __future__ import annotations

from engine_worker.plan import BatchPlan, ScheduledRequest
from engine_worker.request import Request

__all__ = ["BatchBuilder"]


class BatchBuilder:
    """Collects rows until `budget` tokens are given out."""

    def __init__(self, step: int, budget: int) -> None:
        self._step = step
        self._budget = budget
        self._rows: list[ScheduledRequest] = []
        self._preempted: list[str] = []
        self.left = budget
        """Tokens that may still be computed in this step."""

    @property
    def has_preempted(self) -> bool:
        return bool(self._preempted)

    def add(self, request: Request, num_new_tokens: int) -> None:
        """A row that computes the next `num_new_tokens` (>= 1) of the request's known tokens."""
        start = request.num_computed_tokens
        self.left -= num_new_tokens
        self._rows.append(
            ScheduledRequest(
                request.request_id,
                request.prompt_token_ids,
                request.output_token_ids,
                start,
                num_new_tokens,
                request.block_table,
                start + num_new_tokens == request.num_tokens and request.max_tokens > 0,
                request.sampling,
                request.seed,
                request.stop_token_ids,
                request.num_scored,
                request.pooling,
                request.matcher,
            )
        )

    def preempt(self, request_id: str) -> None:
        """Notes a request that lost its blocks."""
        self._preempted.append(request_id)

    def plan(self) -> BatchPlan | None:
        """The frozen batch; None when it has no row."""
        if not self._rows:
            return None
        return BatchPlan(self._step, tuple(self._rows), self._budget - self.left, tuple(self._preempted))
