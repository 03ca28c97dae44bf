"""Every Redis name and lifetime, in one place. Nothing else builds a key.

All names of a request share one hash tag, its queue shard `{q07}`, which its id begins with: `07…`. So any process that
knows the id finds the keys, and on a cluster they live on one node. Every key has a TTL except the queue streams.
"""

from __future__ import annotations

import re
import secrets
from functools import lru_cache

__all__ = [
    "BLOB_TTL_MS",
    "CLASSES",
    "DEAD_MAX",
    "DEAD_TTL_MS",
    "GROUP",
    "LEDGER_TTL_MS",
    "LOAD_TTL_MS",
    "MODEL_TTL_MS",
    "NOBODY",
    "OPEN_TTL_MS",
    "PREFIXES_TTL_MS",
    "QUEUE_PARTS",
    "RETENTION_MS",
    "RID_LENGTH",
    "SEAT_TTL_MS",
    "SERVED_MAX",
    "SERVED_TTL_MS",
    "WORKER_TTL_MS",
    "bell_key",
    "blob_key",
    "channel_name",
    "channel_prefix",
    "control_channel",
    "dead_key",
    "idempotency_key",
    "is_rid",
    "ledger_key",
    "ledger_prefix",
    "limit_key",
    "load_key",
    "load_of_queue",
    "log_key",
    "log_prefix",
    "model_key",
    "models_key",
    "new_rid",
    "open_key",
    "own_bell_key",
    "prefixes_key",
    "queue_key",
    "queues_before",
    "request_key",
    "request_prefix",
    "room_key",
    "seat_key",
    "served_key",
    "shard_of",
    "share_key",
    "spare_bell_key",
    "turn_key",
    "wait_key",
    "worker_key",
    "workers_key",
]

GROUP = "workers"
"""The one consumer group of every queue stream, always created at id 0."""

NOBODY = "nobody"
"""Consumer that holds handed-back entries until a worker takes them; no process reads under this name."""

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
DEAD_TTL_MS = 14 * 86_400_000
DEAD_MAX = 1_000
"""Dead letters kept per shard; the oldest go first."""
SEAT_TTL_MS = 60_000
"""A worker's last `take`: long enough for the same call to be sent again."""
PREFIXES_TTL_MS = 10_000
SERVED_TTL_MS = 7 * 86_400_000
SERVED_MAX = 1_000
"""Shares whose served tokens are kept for a look at them; those with the fewest go first."""

QUEUE_PARTS = {
    name: f":{name}:" for name in ("queue", "load", "wait", "turn", "share", "served", "bell", "spare", "room")
}
"""Keys of one queue differ in this part of their names alone, so that scripts find them from the queue's."""

RID_LENGTH = 26

_RID = re.compile(r"[0-9]{2}[0-9a-f]{24}")


def new_rid(shard: int) -> str:
    """A fresh request id: two digits of shard, then 96 random bits in hex."""
    return f"{shard:02d}{secrets.token_hex(12)}"


@lru_cache(maxsize=8192)  # asked several times for every token
def shard_of(rid: str) -> int:
    """The queue shard a request id names. Raises ValueError when `rid` is not one of ours."""
    if _RID.fullmatch(rid) is None:
        raise ValueError(f"not a request id: {rid[:64]!r}")
    return int(rid[:2])


def is_rid(text: str) -> bool:
    """Whether `text` is a well-formed request id."""
    try:
        shard_of(text)
    except ValueError:
        return False
    return True


def _tag(shard: int) -> str:
    return f"hr:{{q{shard:02d}}}"


def queue_key(shard: int, model: str, klass: str) -> str:
    """stream + group: one entry per waiting or running request, field `rid`. The only kind of key without a TTL."""
    return f"{_tag(shard)}:queue:{model}:{klass}"


def load_key(shard: int, model: str, klass: str) -> str:
    """hash: tokens waiting in the queue of the same name (bounded by submit)."""
    return f"{_tag(shard)}:load:{model}:{klass}"


def load_of_queue(queue: str) -> str:
    """The `load_key` that belongs to a `queue_key`."""
    return queue.replace(QUEUE_PARTS["queue"], QUEUE_PARTS["load"], 1)


def wait_key(shard: int, model: str, klass: str) -> str:
    """sorted set, all scores 0: waiting requests as "<share> <priority> <entry id> <rid>", so that a range of one share
    is its queue in order. An index: what is lost of it is made again from the stream."""
    return f"{_tag(shard)}:wait:{model}:{klass}"


def turn_key(shard: int, model: str, klass: str) -> str:
    """sorted set: shares with waiting requests, by virtual time (tokens served per weight). An index as well."""
    return f"{_tag(shard)}:turn:{model}:{klass}"


def share_key(shard: int, model: str, klass: str, share: str) -> str:
    """hash: virtual time and usual output of one share in one queue."""
    return f"{_tag(shard)}:share:{model}:{klass}:{share}"


def served_key(shard: int, model: str, klass: str) -> str:
    """sorted set: tokens served by share, to look at."""
    return f"{_tag(shard)}:served:{model}:{klass}"


def bell_key(shard: int, model: str, klass: str) -> str:
    """list of at most one element: something waits in this queue; one idle worker takes it and looks."""
    return f"{_tag(shard)}:bell:{model}:{klass}"


def spare_bell_key(shard: int, model: str, klass: str) -> str:
    """list of at most one element: something waits for a worker with more than its reserve of seats free."""
    return f"{_tag(shard)}:spare:{model}:{klass}"


def own_bell_key(shard: int, model: str, consumer: str) -> str:
    """list of at most one element: something waits for this worker alone. No class is spelled with an @."""
    return f"{_tag(shard)}:bell:{model}:@{consumer}"


def seat_key(shard: int, model: str, consumer: str) -> str:
    """hash: a worker's last `take` (its nonce and what it got) and how much room it had left."""
    return f"{_tag(shard)}:seat:{model}:{consumer}"


def room_key(shard: int, model: str) -> str:
    """hash: seats of each worker (empty after its last `take` + its requests), and when that was: "<seats> <ms>"."""
    return f"{_tag(shard)}:room:{model}:{CLASSES[0]}"


def limit_key(shard: int, share: str) -> str:
    """hash: requests and tokens that a share has used of its limits per minute."""
    return f"{_tag(shard)}:limit:{share}"


def open_key(shard: int, share: str) -> str:
    """set: ids of a share's unfinished requests, where their number is limited."""
    return f"{_tag(shard)}:open:{share}"


def queues_before(queue: str) -> list[str]:
    """Queues of the same model that workers serve before this one."""
    base, klass = queue.rsplit(":", 1)
    return [f"{base}:{earlier}" for earlier in CLASSES[: CLASSES.index(klass)]]


def request_key(rid: str) -> str:
    """hash: the request and who runs it; every field is explained in docs/redis_protocol.md."""
    return f"{request_prefix(shard_of(rid))}{rid}"


def request_prefix(shard: int) -> str:
    """What `request_key` of every request of a shard begins with, for scripts that learn the rid inside."""
    return f"{_tag(shard)}:req:"


def log_key(rid: str) -> str:
    """stream: record `seq` at id `<seq+1>-0`, field `d` = the msgpack record."""
    return f"{log_prefix(shard_of(rid))}{rid}"


def log_prefix(shard: int) -> str:
    """What `log_key` of every request of a shard begins with."""
    return f"{_tag(shard)}:log:"


def channel_name(rid: str) -> str:
    """channel: the same msgpack records, as they are appended to the log."""
    return f"{channel_prefix(shard_of(rid))}{rid}"


def channel_prefix(shard: int) -> str:
    """What `channel_name` of every request of a shard begins with."""
    return f"{_tag(shard)}:chan:"


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
    return f"{ledger_prefix(shard)}{day}:{tenant}"


def ledger_prefix(shard: int) -> str:
    """What `ledger_key` begins with: scripts add "<day>:<tenant>", because only Redis knows the day."""
    return f"{_tag(shard)}:ledger:"


def models_key() -> str:
    """set: names of models that have a card, or had one lately."""
    return "hr:models"


def workers_key() -> str:
    """set: ids of workers that have a heartbeat, or had one lately."""
    return "hr:workers"


def model_key(name: str) -> str:
    """string: the msgpack ModelCard that workers of the model refresh."""
    return f"hr:model:{name}"


def blob_key(sha256: str) -> str:
    """string: tokenizer.json or chat template, by the hash of its content."""
    return f"hr:blob:{sha256}"


def worker_key(worker_id: str) -> str:
    """string: the msgpack WorkerCard, a heartbeat with a short TTL."""
    return f"hr:worker:{worker_id}"


def prefixes_key(worker_id: str) -> str:
    """string: fingerprints of the prompt beginnings that a worker has in its cache, 8 bytes each."""
    return f"hr:prefixes:{worker_id}"
