"""What all chaos tests share: one tiny model and its undisturbed answers, and a stack for clients that misbehave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos_load import MODEL, Oracle
from tests.support.patience import Patience
from tests.support.redis_server import RedisServer
from tests.support.renewed import Renewed, renewing
from tests.support.stack import Pod, Stack, Worker
from tests.support.tiny_model import make_tiny_llama

QUEUE_LIMIT = 6


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("chaos") / MODEL, max_position_embeddings=2048)


@pytest.fixture
def patience() -> Iterator[Patience]:
    """What limits on durations are multiplied by: 1.0 unless others use this machine as well."""
    with Patience() as measured:
        yield measured


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)


@dataclass
class Arena:
    """A Redis and the stack on it."""

    server: RedisServer
    stack: Stack


def make_arenas(log_dir: Path, model: Path, **options: Any) -> Iterator[Renewed[Arena]]:
    """Body of a module's fixture `arenas`, on which its tests' `server` and `stack` stand; `options` as of `Stack`."""

    @contextmanager
    def make() -> Iterator[Arena]:
        with RedisServer() as server, Stack(server.url, model, log_dir=log_dir, **options) as stack:
            yield Arena(server, stack)

    yield from renewing(make)


@pytest.fixture
def server(arenas: Renewed[Arena]) -> RedisServer:
    return arenas.get().server


@pytest.fixture
def stack(arenas: Renewed[Arena]) -> Stack:
    return arenas.get().stack


@dataclass
class Front(Arena):
    """Two pods and two models: "tiny" on a wide worker, "narrow" on one that runs two sequences at a time."""

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
def fronts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renewed[Front]]:
    @contextmanager
    def make() -> Iterator[Front]:
        env = {"HEADRACE_DTYPE": "float32", "HEADRACE_FAULT": "step-delay-ms:15"}
        options = {"worker_env": env, "log_dir": tmp_path_factory.mktemp("logs"), "wait": False}
        with RedisServer() as server, Stack(server.url, tiny, pods=1, **options) as stack:
            stack.add_pod({"HEADRACE_MAX_QUEUE_REQUESTS": str(QUEUE_LIMIT)}, wait=False)
            stack.add_worker({"HEADRACE_SERVED_MODEL_NAME": "narrow", "HEADRACE_MAX_NUM_SEQS": "2"}, wait=False)
            stack.wait_ready()
            yield Front(server, stack)

    yield from renewing(make)


@pytest.fixture
def front(fronts: Renewed[Front]) -> Front:
    """For tests that harm no process but a pod, which they start again."""
    return fronts.get()
