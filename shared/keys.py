"""Every Redis name and lifetime, in one place. Nothing else builds a key.

All names of a request share one hash tag, its queue shard `{q07}`, which its id begins with: `07…`. So any process that
knows the id finds the keys, and on a cluster they live on one node. Every key has a TTL except the queue streams.
"""

from __future__ import annotations

import secrets

__all__ = [
    "BLOB_TTL_MS",
    "CLASSES",
    "GROUP",
    "LEDGER_TTL_MS",
    "LOAD_TTL_MS",
    "MODEL_TTL_MS",
    "OPEN_TTL_MS",
    "RETENTION_MS",
    "WORKER_TTL_MS",
    "blob_key",
    "channel_name",
    "control_channel",
    "dead_key",
    "idempotency_key",
    "ledger_key",
    "load_key",
    "log_key",
    "model_key",
    "new_rid",
    "queue_key",
    "request_key",
    "shard_of",
    "worker_key",
]

GROUP = "workers"
"""The one consumer group of every queue stream, always created at id 0."""

CLASSES = ("interactive", "batch")

OPEN_TTL_MS = 3_600_000
"""Request and log keys of an open request; refreshed by acquire and renew."""
RETENTION_MS = 300_000
"""Default life of a finished request's log and metadata: how long it can be replayed."""
LOAD_TTL_MS = 3_600_000
WORKER_TTL_MS = 10_000
MODEL_TTL_MS = 15_000
BLOB_TTL_MS = 3_600_000
LEDGER_TTL_MS = 40 * 86_400_000


def new_rid(shard: int) -> str:
    """A fresh request id: two digits of shard, then 96 random bits in hex."""
    return f"{shard:02d}{secrets.token_hex(12)}"


def shard_of(rid: str) -> int:
    """The queue shard a request id names. Raises ValueError when `rid` is not one of ours."""
    if len(rid) != 26 or not rid[:2].isdigit():
        raise ValueError(f"not a request id: {rid[:64]!r}")
    int(rid[2:], 16)
    return int(rid[:2])


def _tag(shard: int) -> str:
    return f"hr:{{q{shard:02d}}}"


def queue_key(shard: int, model: str, klass: str) -> str:
    """stream + group: one entry per waiting or running request, field `rid`. The only kind of key without a TTL."""
    return f"{_tag(shard)}:queue:{model}:{klass}"


def load_key(shard: int, model: str, klass: str) -> str:
    """hash: tokens waiting in the queue of the same name (bounded by submit)."""
    return f"{_tag(shard)}:load:{model}:{klass}"


def request_key(rid: str) -> str:
    """hash: body, state, epoch, next, entry, queue, cancel, deadline, tenant, tries."""
    return f"{_tag(shard_of(rid))}:req:{rid}"


def log_key(rid: str) -> str:
    """stream: record `seq` at id `<seq+1>-0`, field `d` = the msgpack record."""
    return f"{_tag(shard_of(rid))}:log:{rid}"


def channel_name(rid: str) -> str:
    """channel: the same msgpack records, as they are appended to the log."""
    return f"{_tag(shard_of(rid))}:chan:{rid}"


def control_channel(shard: int) -> str:
    """channel of a shard that every worker hears: cancellations, wake-ups after a hand-back."""
    return f"{_tag(shard)}:ctl"


def dead_key(shard: int) -> str:
    """stream: dead letters, with the reason. Trimmed by count and given a TTL."""
    return f"{_tag(shard)}:dead"


def idempotency_key(shard: int, digest: str) -> str:
    """string: the rid that a client's idempotency key (hashed with its tenant) stands for."""
    return f"{_tag(shard)}:idem:{digest}"


def ledger_key(shard: int, tenant: str, day: str) -> str:
    """hash: tokens in and out of one tenant on one UTC day (YYYYMMDD)."""
    return f"{_tag(shard)}:ledger:{day}:{tenant}"


def model_key(name: str) -> str:
    """string: the msgpack ModelCard that workers of the model refresh."""
    return f"hr:model:{name}"


def blob_key(sha256: str) -> str:
    """string: tokenizer.json or chat template, by the hash of its content."""
    return f"hr:blob:{sha256}"


def worker_key(worker_id: str) -> str:
    """string: the msgpack WorkerCard, a heartbeat with a short TTL."""
    return f"hr:worker:{worker_id}"
