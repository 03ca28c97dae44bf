"""Real pods and simulated workers: hundreds of streams at once, every token in its place, whoever is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks._pod_load.client import Oracle
from tests.support.redis_server import RedisServer
from tests.support.stack import ROOT, Stack, Worker
from tests.support.stream_client import Outcome, follow
from tests.support.tiny_model import make_tiny_llama
from tests.support.wait import eventually

STREAMS = 500


def simulated(redis_url: str, pace: str, *, seqs: int = 64, workers: int = 1, **env: str) -> Stack:
    worker = {"HEADRACE_SIMULATE": pace, "HEADRACE_MAX_NUM_SEQS": str(seqs), **env}
    return Stack(redis_url, workers=workers, worker_env=worker, pod_env={"HEADRACE_LOG_LEVEL": "warning"})


@pytest.mark.timeout(240)
def test_500_streams_through_one_pod_lose_and_double_nothing(redis_url: str) -> None:
    """The client is a process of its own; it knows what each stream has to say."""
    with simulated(redis_url, "tokens_per_s=5000", seqs=STREAMS) as stack:
        command = [sys.executable, "-m", "benchmarks._pod_load.client", stack.pods[0].url, str(STREAMS), "40"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert (found["exact"], found["faults"]) == (STREAMS, [])
        metrics = httpx.get(f"{stack.pods[0].url}/metrics", trust_env=False).text
        assert 'vllm:request_success_total{finished_reason="length",model_name="simulated"} 500.0' in metrics


@pytest.mark.timeout(180)
async def test_a_killed_worker_and_a_drained_one_cost_a_pause_and_no_token(redis_url: str) -> None:
    oracle, tokens, count = Oracle(), 120, 24
    with simulated(redis_url, "stream_tokens_per_s=20", workers=3, HEADRACE_LEASE_MS="1500") as stack:
        outcomes = [Outcome() for _ in range(count)]
        streams = [
            asyncio.create_task(_stream(stack, oracle, i, tokens, outcome)) for i, outcome in enumerate(outcomes)
        ]
        await eventually(lambda: all(len(outcome.ids) > 10 for outcome in outcomes), 60, what="all streams speak")
        busy: list[Worker] = sorted(stack.workers, key=lambda worker: -(card.running if (card := worker.card()) else 0))
        busy[0].kill()
        busy[1].terminate()
        await asyncio.gather(*streams)
    for i, outcome in enumerate(outcomes):
        assert outcome.error is None
        assert outcome.texts == {0: oracle.answer(i, tokens)}
        assert outcome.finish == {0: "length"}
        assert outcome.usage is not None
        assert outcome.usage["completion_tokens"] == tokens


async def test_a_client_that_leaves_frees_its_seat(redis_url: str, redis_server: RedisServer) -> None:
    with simulated(redis_url, "stream_tokens_per_s=50", seqs=1) as stack:
        url = f"{stack.pods[0].base_url}/chat/completions"
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            async with client.stream("POST", url, json=Oracle.body(1, 3000)) as response:
                await anext(response.aiter_raw())
            answer = (await client.post(url, json={**Oracle.body(2, 5), "stream": False})).json()
        assert answer["choices"][0]["message"]["content"] == Oracle().answer(2, 5)
        assert answer["usage"]["completion_tokens"] == 5


async def test_stop_strings_choices_and_log_probabilities_come_as_from_a_model(redis_url: str) -> None:
    whole = Oracle().answer(3, 30)
    stop = whole[40:46]
    with simulated(redis_url, "tokens_per_s=2000,answer_tokens=20") as stack:
        url = f"{stack.pods[0].base_url}/chat/completions"
        body = {**Oracle.body(3, 30), "stream": False, "ignore_eos": True}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            stopped = (await client.post(url, json={**body, "stop": stop, "n": 2})).json()["choices"]
            scored = (await client.post(url, json={**body, "logprobs": True, "top_logprobs": 2})).json()["choices"][0]
            ended = (await client.post(url, json={**body, "ignore_eos": False, "max_tokens": 500})).json()
            refused = await client.post(url, json={**body, "response_format": {"type": "json_object"}})
    assert (stopped[0]["message"]["content"], stopped[0]["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert stopped[1]["message"]["content"] != stopped[0]["message"]["content"]
    assert scored["message"]["content"] == whole
    entries = scored["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == whole
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert 10 <= ended["usage"]["completion_tokens"] <= 31
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")


async def _stream(stack: Stack, oracle: Oracle, number: int, tokens: int, outcome: Outcome) -> None:
    body = oracle.body(number, tokens)
    await follow(lambda: [stack.pods[0].url], "/v1/chat/completions", body, seed=number, outcome=outcome)


def test_the_model_named_lends_its_tokenizer_and_its_name(redis_url: str, tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "lender")
    (model / "model.safetensors").unlink()  # no weights are needed
    env = {"HEADRACE_SIMULATE": "tokens_per_s=1000,seed=4", "HEADRACE_MAX_MODEL_LEN": "200"}
    with Stack(redis_url, model, worker_env=env) as stack:
        models = httpx.get(f"{stack.pods[0].base_url}/models", trust_env=False).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in models] == [("lender", 200)]
        body = {"model": "lender", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        answers = [
            httpx.post(f"{stack.pods[0].base_url}/completions", json=body, trust_env=False).json()["choices"][0]
            for _ in range(2)
        ]
    assert len(answers[0]["token_ids"]) == 12
    assert answers[0] == answers[1]
