"""`docker compose up` as a user runs it: the images of this checkout, an OpenAI client, a pod that dies."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.ports import free_port
from tests.support.wait import eventually_sync

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "headrace-test"
MODEL = "SmolLM2-135M-Instruct"
HAIKU = [{"role": "user", "content": "Write a short haiku about Python programming."}]


class Compose:
    """The project under a name and port of its own, so that it disturbs nobody's."""

    def __init__(self, port: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self._env = {**os.environ, "HEADRACE_PUBLISH_PORT": str(port), "HEADRACE_BIND": "127.0.0.1"}
        for name in ("HEADRACE_API_KEY", "HEADRACE_MODEL", "HEADRACE_SERVED_MODEL_NAME"):
            self._env.pop(name, None)

    def __call__(self, *arguments: str) -> str:
        command = ["docker", "compose", "-p", PROJECT, *arguments]
        run = subprocess.run(command, cwd=ROOT, env=self._env, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        return run.stdout

    def status(self) -> Any:
        return json.loads(self("exec", "-T", "worker", "headrace", "status", "--json"))

    def models(self) -> list[str]:
        """What the balancer's address offers; nothing while no pod is ready."""
        try:
            answer = httpx.get(f"{self.base_url}/models", timeout=5, trust_env=False)
        except httpx.TransportError:
            return []
        return [model["id"] for model in answer.json()["data"]] if answer.is_success else []


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    made = Compose(free_port())
    made("build")
    try:
        made("up", "--detach", "--wait", "--wait-timeout", "300")
        eventually_sync(lambda: made.models() == [MODEL], 60, interval=0.2, what="the model is offered")
        yield made
    except BaseException:
        print(made("logs", "--tail", "50"))
        raise
    finally:
        made("down", "--volumes", "--timeout", "5")


@pytest.fixture
def client(compose: Compose) -> Iterator[OpenAI]:
    with OpenAI(base_url=compose.base_url, api_key="-", max_retries=0, timeout=120) as made:
        yield made


def test_the_usual_client_streams_words_as_they_come(client: OpenAI) -> None:
    began = time.monotonic()
    arrivals, text = [], ""
    asked = {"model": MODEL, "messages": HAIKU, "temperature": 0, "max_tokens": 120, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(**asked, stream=True)
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals.append(time.monotonic() - began)
            text += chunk.choices[0].delta.content
    assert arrivals[0] < arrivals[-1] / 3, "the balancer or a pod holds the stream back"
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == text


def test_every_service_is_healthy_and_runs_without_root(compose: Compose) -> None:
    for service in ("redis", "worker", "api"):
        rows = [json.loads(line) for line in compose("ps", "--format", "json", service).splitlines()]
        assert [row["Health"] for row in rows] == ["healthy"] * (2 if service == "api" else 1)
    for service in ("worker", "api"):
        assert compose("exec", "-T", service, "id", "-u").strip() == "10001"


def test_the_worker_serves_with_kernels_that_were_compiled_with_the_image(compose: Compose) -> None:
    loaded = next(line for line in compose("logs", "worker").splitlines() if '"model loaded"' in line)
    assert '"kernels": "native-' in loaded
    find_compilers = "command -v g++ c++ gcc || echo none"
    assert compose("exec", "-T", "worker", "sh", "-c", find_compilers) == "none\n"


def test_a_pod_holds_no_torch(compose: Compose) -> None:
    assert (
        compose("exec", "-T", "api", "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
        == "None\n"
    )


def test_a_client_that_goes_away_is_noticed_behind_the_balancer(compose: Compose, client: OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert compose.status()["queues"][0]["running"] == 1
    stream.close()
    eventually_sync(lambda: compose.status()["queues"][0]["running"] == 0, 20, what="the request was cancelled")


def test_the_end_of_a_pod_fails_no_new_request(compose: Compose, client: OpenAI) -> None:
    try:
        subprocess.run(["docker", "kill", f"{PROJECT}-api-1"], check=True, capture_output=True)
        for _ in range(6):  # both turns of the balancer, before and after it has noticed
            answer = client.completions.create(model=MODEL, prompt="One", max_tokens=1, temperature=0)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 1
    finally:
        compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "120")
