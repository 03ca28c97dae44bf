"""`python -m engine_worker` as a process: how it starts, what it says, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from engine_worker.faults import FAULT_EXIT_CODE
from engine_worker.worker import EXIT_ENGINE_HUNG, EXIT_OK, EXIT_UNUSABLE
from shared.connections import command_client
from shared.keys import request_key
from tests.support.records import make_request
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack
from tests.support.tiny_model import make_tiny_llama
from tests.support.wait import eventually_sync
from tests.support.workers import ask, finished, read_answer, submit, until_logged

NAMED = {"HEADRACE_SERVED_MODEL_NAME": "tiny"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def submit_token_3(redis_url: str) -> None:
    """Queues a request whose prompt holds token 3."""

    async def put() -> None:
        redis = command_client(redis_url)
        await submit(redis, make_request(prompts=((1, 2, 3),)))
        await redis.aclose()

    asyncio.run(put())


def run_to_end(redis_url: str, model: str | Path, **env: str) -> tuple[int, str]:
    """Exit code and log of a worker that ends by itself."""
    with Stack(redis_url, model, pods=0, workers=1, env=NAMED | env, wait=False) as stack:
        return stack.workers[0].wait(), stack.workers[0].log_path.read_text()


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"HEADRACE_MAX_NUM_SEQS": "-3"}, "HEADRACE_MAX_NUM_SEQS='-3': input should be greater than or equal to 1"),
        ({"HEADRACE_REDIS_URL": "ftp://x"}, "HEADRACE_REDIS_URL=***: must begin with redis://, rediss://, unix://"),
    ],
)
def test_a_bad_setting_ends_the_start_with_its_name_and_code_2(
    redis_url: str, model: Path, env: dict[str, str], line: str
) -> None:
    code, log = run_to_end(redis_url, model, **env)
    assert (code, log.strip()) == (EXIT_UNUSABLE, line)


@pytest.mark.parametrize(
    ("source", "env", "reason"),
    [
        ("/does/not/exist", {}, "/does/not/exist"),
        ("", {"HEADRACE_FAULT": "explode:1"}, "exit-on-token"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line_and_code_2(
    redis_url: str, source: str, env: dict[str, str], reason: str
) -> None:
    code, log = run_to_end(redis_url, source, **env)
    assert code == EXIT_UNUSABLE
    assert "Traceback" not in log
    last = json.loads(log.strip().splitlines()[-1])
    assert last["event"] == "cannot start"
    assert reason in last["reason"]


async def test_a_terminated_worker_hands_back_within_its_limit_and_logs_no_prompt(
    redis: Redis, redis_url: str, model: Path
) -> None:
    request = make_request(prompts=((211, 212, 213, 214),), max_tokens=150)
    with Stack(redis_url, model, pods=0, workers=1, env=NAMED | {"HEADRACE_FAULT": "step-delay-ms:20"}) as stack:
        (worker,) = stack.workers
        await submit(redis, request)
        await until_logged(redis, request.rid, 3)
        started = time.monotonic()
        worker.terminate()
        assert worker.wait() == EXIT_OK
        assert time.monotonic() - started < 2.5
        log = worker.log_path.read_text()
        lines = [json.loads(line) for line in log.splitlines()]
        assert {"worker ready", "request started", "draining", "handed back"} <= {line["event"] for line in lines}
        assert all({"level", "timestamp"} <= line.keys() for line in lines)
        assert "211, 212" not in log
        before = await read_answer(redis, request.rid)
        second = stack.add_worker({"HEADRACE_FAULT": ""})
        answer = await finished(redis, request.rid)
        assert answer.payloads[: len(before.payloads)] == before.payloads
        assert len(answer.tokens()) == 150
        assert second.alive


async def test_a_killed_workers_request_continues_elsewhere(redis: Redis, redis_url: str, model: Path) -> None:
    slow = NAMED | {"HEADRACE_FAULT": "step-delay-ms:20", "HEADRACE_LEASE_MS": "500"}
    request = make_request(max_tokens=40)
    with Stack(redis_url, model, pods=0, workers=1, env=slow) as stack:
        whole = await ask(redis, make_request(max_tokens=40))
        await submit(redis, request)
        await until_logged(redis, request.rid, 3)
        stack.workers[0].kill()
        stack.add_worker()
        answer = await finished(redis, request.rid)
        assert (answer.tokens(), answer.text()) == (whole.tokens(), whole.text())


async def test_a_restarted_worker_gives_up_its_predecessors_requests_before_it_has_loaded(
    redis: Redis, redis_url: str, model: Path
) -> None:
    """The lease lasts an hour, and the new process never gets as far as to take its own requests back."""
    slow = NAMED | {"HEADRACE_FAULT": "step-delay-ms:20", "HEADRACE_LEASE_MS": "3600000"}
    request = make_request(max_tokens=40)
    with Stack(redis_url, model, pods=0, workers=2, env=slow) as stack:
        await submit(redis, request)
        before = await until_logged(redis, request.rid, 3)
        holder = await redis.hget(request_key(request.rid), "holder")
        [victim] = [worker for worker in stack.workers if worker.worker_id.encode() == holder]
        victim.kill()
        victim.env["HEADRACE_MODEL"] = "/does/not/exist"
        victim.start()
        answer = await finished(redis, request.rid)
        assert answer.payloads[: len(before.payloads)] == before.payloads
        assert len(answer.tokens()) == 40
        assert victim.wait() == EXIT_UNUSABLE


def test_a_second_signal_ends_the_process_at_once(redis_url: str, model: Path) -> None:
    hanging = NAMED | {"HEADRACE_FAULT": "step-delay-ms:60000", "HEADRACE_DRAIN_TIMEOUT_MS": "60000"}
    with Stack(redis_url, model, pods=0, workers=1, env=hanging) as stack:
        submit_token_3(redis_url)
        (worker,) = stack.workers
        eventually_sync(lambda: (card := worker.card()) is not None and card.last_step_age_ms > 0)
        worker.terminate()
        eventually_sync(lambda: (card := worker.card()) is not None and card.state == "draining")
        worker.terminate()
        assert worker.wait(5) == 128 + signal.SIGTERM


def test_the_exit_fault_plays_a_crash(redis_url: str, model: Path) -> None:
    with Stack(redis_url, model, pods=0, workers=1, env=NAMED | {"HEADRACE_FAULT": "exit-on-token:3"}) as stack:
        submit_token_3(redis_url)
        assert stack.workers[0].wait() == FAULT_EXIT_CODE


def test_the_hang_fault_ends_with_the_watchs_code(redis_url: str, model: Path) -> None:
    hanging = NAMED | {"HEADRACE_FAULT": "hang-on-token:3", "HEADRACE_STEP_LIMIT_MS": "200"}
    with Stack(redis_url, model, pods=0, workers=1, env=hanging) as stack:
        submit_token_3(redis_url)
        assert stack.workers[0].wait() == EXIT_ENGINE_HUNG


def test_a_worker_waits_for_a_redis_that_is_not_there_yet(model: Path) -> None:
    with RedisServer() as server:
        server.kill()
        with Stack(server.url, model, pods=0, workers=1, env=NAMED, wait=False) as stack:
            (worker,) = stack.workers
            eventually_sync(lambda: "waiting for Redis" in worker.log())
            server.start()
            worker.wait_ready()
            worker.terminate()
            assert worker.wait() == EXIT_OK
