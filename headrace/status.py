"""`headrace status`: what runs, what waits and for how long, read from Redis.

In: a Redis client, perhaps the id of a request. Out: tables or JSON of workers, models and queues, or where that
request stands. Reads only; asks no pod and no worker.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypedDict

import msgspec.structs
from redis.asyncio import Redis
from rich.console import Console

from headrace.tables import console, table
from shared.keys import is_rid
from shared.messages import ModelCard, WorkerCard
from shared.queue import Depth, RequestQueue
from shared.registry import list_models, list_workers

__all__ = ["Status", "collect", "run", "show", "show_request", "worker_ready_on"]

STUCK_MS = 60_000
"""A worker with requests whose last step is older than this is not healthy."""
_CACHE_NOTE = (
    "A worker takes its cache's memory when it starts and keeps it. In use is what running requests hold; the rest is"
    " free for new ones, and until then keeps the prompts of earlier ones."
)


class Status(TypedDict):
    """What `--json` prints. Durations in ms or s as named, sizes in blocks and tokens, null = not known yet."""

    workers: list[dict[str, Any]]
    models: list[dict[str, Any]]
    queues: list[dict[str, Any]]
    tenants: list[dict[str, Any]]


async def collect(redis: Redis, shards: int) -> Status:
    """Reads it all. Raises one of REDIS_DOWN when Redis cannot be reached."""
    cards = await list_models(redis)
    workers = await list_workers(redis)
    queue = RequestQueue(redis)
    queues, tenants = [], []
    for name in sorted(cards):
        tenants += await _tenants(queue, name, shards)
        depths = [await queue.depth(name, shard) for shard in range(shards)]
        queues.append(
            {
                "model": name,
                "waiting": sum(depth.waiting for depth in depths),
                "waiting_batch": sum(depth.waiting_batch for depth in depths),
                "running": sum(depth.running for depth in depths),
                "waiting_tokens": sum(depth.waiting_tokens for depth in depths),
                "expected_wait_s": _longest_wait(depths),
            }
        )
    return Status(
        workers=[msgspec.structs.asdict(worker) for worker in sorted(workers, key=lambda card: card.worker_id)],
        models=[_model(cards[name], workers) for name in sorted(cards)],
        queues=queues,
        tenants=tenants,
    )


async def _tenants(queue: RequestQueue, model: str, shards: int) -> list[dict[str, Any]]:
    """Those served most and those that wait, all shards together."""
    served: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for shard in range(shards):
        for use in await queue.tenants(model, shard):
            served[use.share] += use.served_tokens
            waiting[use.share] += use.waiting
    return [
        {"model": model, "tenant": share or "default", "served_tokens": tokens, "waiting": waiting[share]}
        for share, tokens in served.most_common()
    ]


def _longest_wait(depths: Sequence[Depth]) -> float | None:
    """Seconds in the shard that is behind most: a new request may land there. None = not measured in one of them."""
    waits = [depth.expected_wait_s for depth in depths]
    return None if None in waits else max((wait for wait in waits if wait is not None), default=0.0)


def _seconds(wait: float | None) -> str:
    return "not known yet" if wait is None else f"{wait:.0f} s"


def _model(card: ModelCard, workers: list[WorkerCard]) -> dict[str, Any]:
    return {
        "name": card.name,
        "architecture": card.architecture,
        "dtype": card.dtype,
        "max_model_len": card.window,
        "workers_ready": sum(worker.model == card.name and worker.state == "ready" for worker in workers),
    }


def _cache(worker: dict[str, Any]) -> tuple[str, str]:
    """Memory that is set aside for the KV cache, and the part of it that requests hold now."""
    total, size = worker["kv_blocks_total"], worker["kv_cache_bytes"]
    used = f"{100 * worker['kv_blocks_used'] / total:.0f} %" if total else "-"
    return (f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB") if size else "-", used


def show(status: Status, out: Console) -> None:
    """Prints the tables; an empty one says what its emptiness means."""
    workers = [
        [w["worker_id"], w["state"], w["model"], f"{w['running']}/{w['max_num_seqs']}",
         *_cache(w), f"{w['tokens_per_s']:.1f}"]
        for w in status["workers"]
    ]  # fmt: skip
    if workers:
        columns = ["worker", "state", "model", "running", "cache reserved", "in use", "tokens/s"]
        out.print(table(columns, workers, title="Workers"))
        out.print(f"[dim]{_CACHE_NOTE}[/]")
    else:
        out.print("[bold]Workers[/]\nnone: nothing serves until a worker starts (headrace worker)")
    waiting = {queue["model"]: queue for queue in status["queues"]}
    models = [
        [m["name"], m["dtype"], m["max_model_len"], m["workers_ready"], waiting[m["name"]]["running"],
         waiting[m["name"]]["waiting"], waiting[m["name"]]["waiting_tokens"],
         _seconds(waiting[m["name"]]["expected_wait_s"])]
        for m in status["models"]
    ]  # fmt: skip
    if models:
        columns = ["model", "dtype", "window", "workers", "running", "waiting", "tokens waiting", "expected wait"]
        out.print()
        out.print(table(columns, models, title="Models"))
    tenants = [[t["tenant"], t["model"], t["served_tokens"], t["waiting"]] for t in status["tenants"]]
    if tenants:
        out.print()
        out.print(table(["tenant", "model", "tokens served", "waiting"], tenants, title="Tenants"))


def worker_ready_on(host: str, status: Status) -> bool:
    """Whether a worker on `host` is ready and, where it has requests, makes progress."""
    return any(
        worker["host"] == host
        and worker["state"] == "ready"
        and (not worker["running"] or worker["last_step_age_ms"] < STUCK_MS)
        for worker in status["workers"]
    )


async def run(redis: Redis, shards: int, as_json: bool, worker_on: str | None) -> int:
    """Prints the status, or with `worker_on` only answers. Returns the exit code."""
    status = await collect(redis, shards)
    if worker_on is not None:
        return 0 if worker_ready_on(worker_on, status) else 1
    if as_json:
        print(json.dumps(status, indent=2))
    else:
        show(status, console())
    return 0


async def show_request(redis: Redis, given: str) -> int:
    """Prints where a request stands: its place in the queue and the wait to expect. Returns the exit code.

    `given`: its id, as a client sees it (chatcmpl-…, cmpl-…) or as `headrace dead` shows it.
    """
    rid = given.rpartition("-")[2]
    queue = RequestQueue(redis)
    state = await queue.state(rid) if is_rid(rid) else None
    if state is None:
        print(f"headrace: no request {given} is known (it may have ended and been forgotten)", file=sys.stderr)
        return 1
    place = await queue.position(rid) if state.state == "open" else None
    if place is None:
        print(f"{rid} has ended")
    elif place.ahead == 0 and place.expected_wait_s == 0:
        print(f"{rid} runs; {state.next} records so far")
    else:
        print(f"{rid} waits; {place.ahead} ahead of it, expected wait {_seconds(place.expected_wait_s)}")
    return 0
