"""What a worker needs of an engine, whatever computes the tokens: a model (`engine`), or nobody (`simulate`).

In: requests and aborts, from any thread. Out: events, one list per step, in the thread that owns the engine. Standard
library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from engine_worker.request import FinishReason, Klass, Request, TokenEvent

__all__ = ["EngineStats", "ServingEngine", "SteppingEngine"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; times are `time.monotonic()` seconds, 0 before the first step."""

    running: int
    waiting: int
    blocks_used: int
    """Held by running requests."""
    blocks_cached: int
    """Unreferenced, kept for their content, available at any time."""
    blocks_total: int
    steps: int
    """Batches computed."""
    last_step_start: float
    last_step_end: float
    """Earlier than `last_step_start` while a step is under way."""
    counters: dict[str, int] = field(default_factory=dict)
    """Since start: prompt_tokens, generation_tokens, computed_tokens, preemptions, cached_tokens."""
    batch_running: int = 0
    """Of `running`, those of class batch."""
    batch_waiting: int = 0


class SteppingEngine(Protocol):
    """What the engine loop drives; all but `step`, `took` and `get_ready` may be called from any thread."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None:
        """Raises InvalidRequest (ContextLengthExceeded among them) for what it cannot run; nothing has begun then."""

    def abort(self, request_id: str, reason: FinishReason) -> None: ...

    def free_seats(self, klass: Klass) -> int:
        """How many more requests of this class would run at once if they came now; negative: so many wait."""

    def step(self) -> list[TokenEvent]:
        """One pass. Raises only what no single request is to blame for: then the engine is done for."""

    def took(self, seconds: float) -> None:
        """The last step took so long: later ones may be planned by it."""

    def get_ready(self) -> bool:
        """A few milliseconds of what later steps would have to do, for when there is nothing else; False: all done."""


class ServingEngine(SteppingEngine, Protocol):
    """The same with what the worker tells others about it, from any thread."""

    def max_request_tokens(self) -> int:
        """Prompt + output tokens of one request at most."""

    def stats(self) -> EngineStats: ...
