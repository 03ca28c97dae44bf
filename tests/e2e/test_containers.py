"""A pod and a worker against Redis in a container, and that container's own health check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from openai import OpenAI
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from tests.support.stack import Stack
from tests.support.tiny_model import make_tiny_llama
from tests.support.wait import eventually_sync

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
[IMAGE] = re.findall(r"image: (redis:\S+)", COMPOSE)
[HEALTHCHECK] = re.findall(r'test: \["CMD-SHELL", "(.*)"\]', COMPOSE)
# One image less to pull, and one start-up less that could hang; every container here is a context manager.
testcontainers_config.ryuk_disabled = True


@contextmanager
def redis_container(*options: str) -> Iterator[DockerContainer]:
    with DockerContainer(IMAGE).with_exposed_ports(6379).with_command(["redis-server", *options]) as container:
        yield container


def inside(container: DockerContainer, command: str) -> tuple[int, str]:
    code, output = container.exec(["sh", "-c", command])
    return code, output.decode()


def healthy(container: DockerContainer) -> bool:
    return inside(container, HEALTHCHECK)[0] == 0


@pytest.fixture
def container_url() -> Iterator[str]:
    """URL of the server in the container, checked to be that server and no other one that listens here."""
    with redis_container("--maxmemory-policy", "noeviction") as container:
        eventually_sync(lambda: healthy(container), 30, interval=0.1, what="Redis in the container is healthy")
        url = f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}/0"
        with redis.Redis.from_url(url) as client:
            run_id = client.info("server")["run_id"]
        assert run_id in inside(container, "redis-cli info server")[1]
        yield url


def test_pod_and_worker_serve_over_a_redis_container(container_url: str, tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    asked |= {"temperature": 0, "max_tokens": 24}
    with (
        Stack(container_url, model, worker_env={"HEADRACE_SERVED_MODEL_NAME": "tiny"}) as stack,
        OpenAI(base_url=stack.pods[0].base_url, api_key="-", max_retries=0) as client,
    ):
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0
    assert "".join(pieces) == whole.choices[0].message.content


def test_ct_01_the_health_check_fails_while_redis_loads() -> None:
    """`redis-cli ping` exits 0 with LOADING; what depends on it would start too early."""
    many = "redis-cli eval \"for i = 1, 4000 do redis.call('SET', i, i) end\" 0"
    with redis_container("--appendonly", "yes", "--key-load-delay", "2000") as container:
        eventually_sync(lambda: healthy(container), 30, interval=0.1, what="healthy when empty")
        assert inside(container, many)[0] == 0
        container.get_wrapped_container().restart(timeout=5)  # reads 4000 keys again, 2 ms each

        def loading() -> bool:
            answer = inside(container, "redis-cli ping; echo $?; " + HEALTHCHECK + "; echo $?")[1].split("\n")
            if not answer[0].startswith("LOADING"):
                return False
            # An empty line follows the error. A check that fell into the last moment of loading may see its end.
            return [line for line in answer if line.isdigit()] == ["0", "1"]

        eventually_sync(loading, 20, interval=0.05, what="ping exits 0 while loading, the health check does not")
        eventually_sync(lambda: healthy(container), 60, interval=0.1, what="healthy when loaded")


@pytest.mark.parametrize("trouble", ["down", "noauth"])
def test_ct_02_the_health_check_fails_when_redis_cannot_be_used(trouble: str) -> None:
    with redis_container() as container:
        eventually_sync(lambda: healthy(container), 30, interval=0.1, what="healthy when it can be used")
        if trouble == "noauth":
            assert inside(container, "redis-cli config set requirepass secret")[1].strip() == "OK"
            assert not healthy(container)
        else:
            code, _ = inside(container, HEALTHCHECK.replace("redis-cli", "redis-cli -p 6380"))
            assert code != 0
