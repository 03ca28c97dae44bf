"""What the lease machine knows: of each request what must be true, of each worker and claim what it was given."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.claims import Acquired, ClaimQueue, Entry

__all__ = ["Held", "Model", "Worker"]


@dataclass
class Model:
    """What must be true of one request."""

    rid: str
    klass: str
    log: list[bytes | None] = field(default_factory=list)
    """None = a terminal record that a script wrote."""
    done: bool = False
    cancelled: bool = False
    epoch: int = 0
    owner: tuple[int, int] | None = None
    """Worker number and epoch of the only one who may write."""
    tries: int = 0
    completion_tokens: int = 0


@dataclass(eq=False)
class Worker:
    number: int
    queue: ClaimQueue
    unread: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class Held:
    """A claim somebody has or once had."""

    worker: Worker
    acquired: Acquired
