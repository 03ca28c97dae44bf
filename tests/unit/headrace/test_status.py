"""`headrace status`, against a real Redis that holds what workers write."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from redis.asyncio import Redis
from rich.console import Console

from headrace import status
from shared.keys import new_rid
from shared.messages import GenerateRequest, ModelCard, WorkerCard
from shared.params import SamplingParams, StopConditions
from shared.queue import RequestQueue
from shared.registry import blob_id, heartbeat, publish_model

TOKENIZER = b"{}"


def worker(**changes: Any) -> WorkerCard:
    values = {"worker_id": "w1", "model": "m", "host": "here", "max_num_seqs": 8, "running": 2}
    return WorkerCard(
        **{
            **values,
            "kv_blocks_used": 5,
            "kv_blocks_total": 20,
            "kv_cache_bytes": 3 << 29,
            "tokens_per_s": 12.34,
            **changes,
        }
    )


async def publish(redis: Redis, *workers: WorkerCard) -> None:
    card = ModelCard(
        name="m",
        created=1,
        max_model_len=8192,
        max_request_tokens=2048,
        vocab_size=10,
        eos_token_ids=(2,),
        tokenizer=blob_id(TOKENIZER),
        dtype="bfloat16",
    )
    await publish_model(redis, card, TOKENIZER, "")
    for each in workers:
        await heartbeat(redis, each, card, [TOKENIZER])


async def queue_one(redis: Redis, shard: int) -> None:
    request = GenerateRequest(new_rid(shard), "m", ((1, 2, 3),), SamplingParams(), StopConditions(max_tokens=1))
    await RequestQueue(redis).submit(request, max_waiting=10, max_waiting_tokens=1000)


def shown(found: status.Status) -> str:
    out = io.StringIO()
    status.show(found, Console(file=out, width=200, highlight=False))
    return out.getvalue()


async def test_json_holds_workers_models_and_the_queues_of_all_shards(
    redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    await publish(redis, worker(), worker(worker_id="w2", state="draining"))
    for shard in (0, 1, 1):
        await queue_one(redis, shard)
    assert await status.run(redis, 2, True, None) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(w["worker_id"], w["state"], w["running"], w["kv_blocks_used"]) for w in found["workers"]] == [
        ("w1", "ready", 2, 5),
        ("w2", "draining", 2, 5),
    ]
    assert found["models"] == [
        {"name": "m", "architecture": "", "dtype": "bfloat16", "max_model_len": 2048, "workers_ready": 1}
    ]
    assert found["tenants"] == [{"model": "m", "tenant": "default", "served_tokens": 0, "waiting": 3}]
    assert found["queues"] == [
        {"model": "m", "waiting": 3, "waiting_batch": 0, "running": 0, "waiting_tokens": 9, "expected_wait_s": None}
    ]


async def test_the_tables_show_use_and_depth(redis: Redis) -> None:
    await publish(redis, worker())
    await queue_one(redis, 0)
    rows = [line.split() for line in shown(await status.collect(redis, 1)).splitlines()]
    assert ["w1", "ready", "m", "2/8", "1.5", "GiB", "25", "%", "12.3"] in rows
    assert ["m", "bfloat16", "2048", "1", "0", "1", "3", "not", "known", "yet"] in rows


@pytest.mark.parametrize(
    ("changes", "cache"),
    [
        ({"kv_blocks_used": 0}, ["1.5", "GiB", "0", "%"]),
        ({"kv_cache_bytes": 200 << 20}, ["200", "MiB", "25", "%"]),
        ({"kv_cache_bytes": 0}, ["-", "25", "%"]),
        ({"kv_blocks_used": 0, "kv_blocks_total": 0, "kv_cache_bytes": 0}, ["-", "-"]),
    ],
    ids=["idle", "small", "simulated", "loading"],
)
async def test_memory_that_is_reserved_is_told_from_what_requests_hold(
    redis: Redis, changes: dict[str, int], cache: list[str]
) -> None:
    await publish(redis, worker(**changes))
    text = shown(await status.collect(redis, 1))
    assert ["w1", "ready", "m", "2/8", *cache, "12.3"] in [line.split() for line in text.splitlines()]
    assert "keeps it" in text


async def test_an_empty_service_says_what_is_missing(redis: Redis) -> None:
    assert "headrace worker" in shown(await status.collect(redis, 1))


@pytest.mark.parametrize(
    ("card", "healthy"),
    [
        (worker(), True),
        (worker(state="loading"), False),
        (worker(host="elsewhere"), False),
        (worker(last_step_age_ms=status.STUCK_MS), False),
        (worker(running=0, last_step_age_ms=status.STUCK_MS), True),
        (None, False),
    ],
    ids=["ready", "loading", "other host", "stuck", "idle", "none"],
)
async def test_a_container_is_healthy_while_its_worker_is(redis: Redis, card: WorkerCard | None, healthy: bool) -> None:
    await publish(redis, *([card] if card else []))
    assert await status.run(redis, 1, False, "here") == (0 if healthy else 1)


async def test_a_request_is_shown_with_its_place_and_the_wait(redis: Redis, capsys: pytest.CaptureFixture[str]) -> None:
    await publish(redis, worker())
    queue, rids = RequestQueue(redis), [new_rid(0) for _ in range(3)]
    for rid in rids:
        request = GenerateRequest(rid, "m", ((1, 2, 3),), SamplingParams(), StopConditions(max_tokens=1))
        await queue.submit(request, max_waiting=10, max_waiting_tokens=1000)
    assert await status.show_request(redis, f"chatcmpl-{rids[2]}") == 0
    assert capsys.readouterr().out == f"{rids[2]} waits; 2 ahead of it, expected wait not known yet\n"

    await queue.cancel(rids[0])  # the first one that ends: now there is a rate
    assert await status.show_request(redis, rids[2]) == 0
    assert f"{rids[2]} waits; 1 ahead of it, expected wait 2 s" in capsys.readouterr().out
    [waiting] = (await status.collect(redis, 1))["queues"]
    assert waiting["expected_wait_s"] == pytest.approx(3, abs=0.5), "two and the new one at one a second"

    assert await status.show_request(redis, rids[0]) == 0
    assert capsys.readouterr().out == f"{rids[0]} has ended\n"
    assert await status.show_request(redis, new_rid(0)) == 1
    assert await status.show_request(redis, "nonsense") == 1
