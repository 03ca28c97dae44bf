"""What all chaos tests share: one tiny model and its undisturbed answers, and a stack for clients that misbehave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.chaos_load import MODEL, Oracle
from tests.support.crowding import crowding
from tests.support.redis_server import RedisServer
from tests.support.stack import Pod, Process, Stack, Worker
from tests.support.tiny_model import make_tiny_llama

QUEUE_LIMIT = 6


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failure shows what the processes wrote, also those that outlive the test."""
    report = (yield).get_result()  # type: ignore[misc, attr-defined]
    if report.failed:
        for fixture in getattr(item, "funcargs", {}).values():
            stack = getattr(fixture, "stack", fixture)
            if isinstance(stack, Stack):
                report.sections.append(("processes", stack.logs()))
            elif isinstance(stack, Process):
                report.sections.append(("processes", stack.log()))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("chaos") / MODEL, max_position_embeddings=2048)


@pytest.fixture
def patience() -> float:
    """What limits on durations are multiplied by: 1.0 unless others use this machine as well."""
    return crowding()


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)


@dataclass
class Front:
    """Two pods and two models: "tiny" on a wide worker, "narrow" on one that runs two sequences at a time."""

    server: RedisServer
    stack: Stack

    @property
    def roomy(self) -> Pod:
        return self.stack.pods[0]

    @property
    def strict(self) -> Pod:
        """Lets only QUEUE_LIMIT requests wait."""
        return self.stack.pods[1]

    @property
    def wide(self) -> Worker:
        return self.stack.workers[0]

    @property
    def narrow(self) -> Worker:
        return self.stack.workers[1]


@pytest.fixture(scope="session")
def front(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """For tests that harm no process but a pod, which they start again."""
    env = {"HEADRACE_DTYPE": "float32", "HEADRACE_FAULT": "step-delay-ms:15"}
    options = {"worker_env": env, "log_dir": tmp_path_factory.mktemp("logs"), "wait": False}
    with RedisServer() as server, Stack(server.url, tiny, pods=1, **options) as stack:
        stack.add_pod({"HEADRACE_MAX_QUEUE_REQUESTS": str(QUEUE_LIMIT)}, wait=False)
        stack.add_worker({"HEADRACE_SERVED_MODEL_NAME": "narrow", "HEADRACE_MAX_NUM_SEQS": "2"}, wait=False)
        stack.wait_ready()
        yield Front(server, stack)
