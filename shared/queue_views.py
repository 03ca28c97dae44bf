"""What a pod sees of the queue: frozen views of one instant. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import Use
from shared.messages import GenerateRequest

__all__ = ["DeadLetter", "Depth", "Position", "RequestState", "Submitted", "TenantUse"]


@dataclass(frozen=True, slots=True)
class Submitted:
    rid: str
    """The request's own id, or that of the earlier request it is attached to."""
    created: bool
    use: Use | None = None
    """Of the share's limits a minute, this request included; None where there are none."""


@dataclass(frozen=True, slots=True)
class TenantUse:
    """One share in the queues of one model."""

    share: str
    served_tokens: int
    """Of ended requests, those found in a cache left out."""
    waiting: int


@dataclass(frozen=True, slots=True)
class RequestState:
    """Metadata of one request at one instant."""

    state: str
    """"open" or "done"."""
    epoch: int
    """Number of the last acquisition; 0 = never acquired."""
    next: int
    """Records in the log = seq of the next one."""
    cancel: bool
    deadline_ms: int
    request: GenerateRequest
    tenant: str


@dataclass(frozen=True, slots=True)
class Depth:
    waiting: int
    running: int
    waiting_tokens: int
    """Prompt tokens of the waiting requests."""
    expected_wait_s: float | None = None
    """Of a request queued now, at the measured drain rate; None = nothing measured yet."""
    waiting_batch: int = 0
    """Those of class batch among the waiting ones."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up."""

    id: str
    """Its place in the shard's dead letters; begins with Unix milliseconds."""
    rid: str
    model: str
    code: str
    message: str
    tenant: str
    tries: int
    body: bytes
    """The msgpack GenerateRequest, undecoded: it may be what could not be read."""


class Position(NamedTuple):
    ahead: int
    """Waiting requests that are served before this one."""
    expected_wait_s: float | None
    """At the measured drain rate; None = nothing measured yet."""
