"""`headrace status`: what runs and what waits, read from Redis.

In: a Redis client. Out: tables or JSON of workers, models and queues. Reads only; asks no pod and no worker.
"""

from __future__ import annotations

import json
from typing import Any, TypedDict

import msgspec.structs
from redis.asyncio import Redis
from rich.console import Console

from headrace.tables import console, table
from shared.messages import ModelCard, WorkerCard
from shared.queue import RequestQueue
from shared.registry import list_models, list_workers

__all__ = ["Status", "collect", "run", "show", "worker_ready_on"]

STUCK_MS = 60_000
"""A worker with requests whose last step is older than this is not healthy."""


class Status(TypedDict):
    """What `--json` prints. Durations in ms or s as named, sizes in blocks and tokens."""

    workers: list[dict[str, Any]]
    models: list[dict[str, Any]]
    queues: list[dict[str, Any]]


async def collect(redis: Redis, shards: int) -> Status:
    """Reads it all. Raises one of REDIS_DOWN when Redis cannot be reached."""
    cards = await list_models(redis)
    workers = await list_workers(redis)
    queue = RequestQueue(redis)
    queues = []
    for name in sorted(cards):
        depths = [await queue.depth(name, shard) for shard in range(shards)]
        queues.append(
            {
                "model": name,
                "waiting": sum(depth.waiting for depth in depths),
                "running": sum(depth.running for depth in depths),
                "waiting_tokens": sum(depth.waiting_tokens for depth in depths),
            }
        )
    return Status(
        workers=[msgspec.structs.asdict(worker) for worker in sorted(workers, key=lambda card: card.worker_id)],
        models=[_model(cards[name], workers) for name in sorted(cards)],
        queues=queues,
    )


def _model(card: ModelCard, workers: list[WorkerCard]) -> dict[str, Any]:
    return {
        "name": card.name,
        "architecture": card.architecture,
        "dtype": card.dtype,
        "max_model_len": card.max_model_len,
        "workers_ready": sum(worker.model == card.name and worker.state == "ready" for worker in workers),
    }


def _cache_use(worker: dict[str, Any]) -> str:
    """Used part of the KV cache, in percent of its blocks."""
    total = worker["kv_blocks_total"]
    return f"{100 * worker['kv_blocks_used'] / total:.0f} %" if total else "-"


def show(status: Status, out: Console) -> None:
    """Prints the tables; an empty one says what its emptiness means."""
    workers = [
        [w["worker_id"], w["state"], w["model"], f"{w['running']}/{w['max_num_seqs']}",
         _cache_use(w), f"{w['tokens_per_s']:.1f}"]
        for w in status["workers"]
    ]  # fmt: skip
    if workers:
        out.print(table(["worker", "state", "model", "running", "cache", "tokens/s"], workers, title="Workers"))
    else:
        out.print("[bold]Workers[/]\nnone: nothing serves until a worker starts (headrace worker)")
    waiting = {queue["model"]: queue for queue in status["queues"]}
    models = [
        [m["name"], m["dtype"], m["max_model_len"], m["workers_ready"], waiting[m["name"]]["running"],
         waiting[m["name"]]["waiting"], waiting[m["name"]]["waiting_tokens"]]
        for m in status["models"]
    ]  # fmt: skip
    if models:
        columns = ["model", "dtype", "window", "workers", "running", "waiting", "tokens waiting"]
        out.print()
        out.print(table(columns, models, title="Models"))


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
