"""One batch while it is being planned: what is left of the token budget, the rows chosen so far, their shape."""

from __future__ import annotations

from engine_worker.plan import BatchPlan, ScheduledRequest
from engine_worker.request import Klass, Request
from engine_worker.scheduling.cost import StepShape

__all__ = ["BatchBuilder"]


class BatchBuilder:
    """Collects rows until `budget` tokens are given out; the last row may take up to `spare` more."""

    def __init__(self, step: int, budget: int) -> None:
        self._step = step
        self._budget = budget
        self._rows: list[ScheduledRequest] = []
        self._preempted: list[str] = []
        self._lost: set[Klass] = set()
        self.left = budget
        """Tokens that may still be computed in this step; below 0 when a prompt took of `spare`."""
        self.spare = 0
        """Tokens beyond `left` that may finish a prompt."""
        self.shape = StepShape()
        """Of the rows so far."""

    def has_preempted(self, klass: Klass) -> bool:
        """Whether a request of this class lost its blocks in this step."""
        return klass in self._lost

    def add(self, request: Request, num_new_tokens: int) -> None:
        """A row that computes the next `num_new_tokens` (>= 1) of the request's known tokens."""
        start = request.num_computed_tokens
        samples = start + num_new_tokens == request.num_tokens and request.max_tokens > 0
        self.left -= num_new_tokens
        self.shape.add(start, num_new_tokens, samples)
        self._rows.append(_row(request, start, num_new_tokens, samples))

    def add_decodes(self, requests: list[Request]) -> None:
        """Rows that compute the one token left of each: `add(request, 1)`, in a loop that is worth being short."""
        context = samples = 0
        for request in requests:
            start = request.num_computed_tokens
            draws = request.max_tokens > 0
            context += start + 1
            samples += draws
            self._rows.append(_row(request, start, 1, draws))
        self.left -= len(requests)
        self.shape.tokens += len(requests)
        self.shape.context += context
        self.shape.samples += samples

    def preempt(self, request: Request) -> None:
        """Notes a request that lost its blocks."""
        self._preempted.append(request.request_id)
        self._lost.add(request.klass)

    def plan(self) -> BatchPlan | None:
        """The frozen batch; None when it has no row."""
        if not self._rows:
            return None
        return BatchPlan(self._step, tuple(self._rows), self._budget - self.left, tuple(self._preempted))


def _row(request: Request, start: int, num_new_tokens: int, samples: bool) -> ScheduledRequest:
    # Past the named constructor, which does the same at three times the cost: this line runs for every row.
    return tuple.__new__(
        ScheduledRequest,
        (
            request.request_id,
            request.prompt_token_ids,
            request.output_token_ids,
            start,
            num_new_tokens,
            request.block_table,
            samples,
            request.sampling,
            request.seed,
            request.stop_token_ids,
            request.num_scored,
            request.pooling,
            request.matcher,
        ),
    )
