"""The nouns of the worker's side of the queue: what is read, held, appended and answered. Frozen; those that are made
for every token are structs, which cost a fifth of a dataclass."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from shared import keys
from shared.messages import GenerateRequest

__all__ = ["KINDS", "Acquired", "Claim", "Commit", "CommitReply", "Consumer", "Entry", "RenewReply", "ReplyKind"]


class ReplyKind(IntEnum):
    """What a script did with one record or claim; the numbers are the scripts' own."""

    OK = 0
    DUP = 1
    """Logged before (a reply was lost): done."""
    GAP = 2
    """Redis went back in time: send again from `next`."""
    FENCED = 3
    """Another owner has it: drop it."""
    CLOSED = 4
    """It has its terminal record: drop it."""
    GONE = 5
    """No metadata: expired, or lost by Redis. Drop it; the pod restores what it still relays."""


KINDS = tuple(ReplyKind)
"""By number: calling the enum costs more than all else that is done with a reply."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """One worker process as one model's queues in one shard know it, and the terms on which it takes their requests."""

    name: str
    """Unique among living processes; a restarted process may use its predecessor's."""
    model: str
    shard: int = 0
    lease_ms: int = 10_000
    max_tries: int = 2
    """Owners in a row that may vanish without a record."""
    retention_ms: int = keys.RETENTION_MS
    """How long an ended request stays readable."""
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    """Of the process: tells it from others of its name. "" is no process."""

    @property
    def queues(self) -> list[str]:
        """In the order of `keys.CLASSES`."""
        return [keys.queue_key(self.shard, self.model, klass) for klass in keys.CLASSES]


@dataclass(frozen=True, slots=True)
class Entry:
    """A queue entry delivered to this consumer, not yet acquired unless it has an epoch."""

    entry_id: bytes
    rid: str
    queue: str
    epoch: int = 0
    """That of its acquisition, where the call that gave it began the request as well; else 0."""
    body: bytes = field(default=b"", repr=False)
    """The request, where it has begun."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write one request's log, valid until a higher epoch exists."""

    rid: str
    entry_id: bytes
    queue: str
    epoch: int

    @property
    def place(self) -> int:
        """Where it stands in a worker's line: 0 = behind what was taken before it. What another worker ran has been
        served already and goes on before anything new begins: it is negative, and the lower the earlier it was queued.
        """
        if self.epoch == 1:
            return 0
        ms, _, number = self.entry_id.partition(b"-")
        return (int(ms) << 16) + min(int(number or 0), (1 << 16) - 1) - (1 << 64)


@dataclass(frozen=True, slots=True)
class Acquired:
    claim: Claim
    request: GenerateRequest
    records: list[bytes]
    """What earlier owners logged, seq 0 to next_seq - 1."""
    next_seq: int
    tries: int
    """Owners in a row, this one included, without a committed record."""


class Commit(msgspec.Struct, frozen=True, gc=False):
    """One record to append. Token counts matter on the terminal record only: they go to ledger and fair share."""

    claim: Claim
    seq: int
    payload: bytes
    end: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that needed no computing: they cost no fair share."""


class CommitReply(msgspec.Struct, frozen=True, gc=False):
    kind: ReplyKind
    next: int


@dataclass(frozen=True, slots=True)
class RenewReply:
    kind: ReplyKind
    cancelled: bool
