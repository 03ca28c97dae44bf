"""Real workers and pods as subprocesses against a given Redis, for the e2e and chaos suites.

In: a Redis URL and a model source. Out: a `Stack` whose processes are ready, each with kill, stop, cont, restart. Each
writes to a log file that is part of every failure message. Nothing outlives the `with` block, nor the test process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec
import redis

from shared.keys import worker_key
from shared.messages import WorkerCard
from tests.support.ports import free_port
from tests.support.wait import eventually_sync

__all__ = ["Pod", "Process", "Stack", "Worker"]

ROOT = Path(__file__).resolve().parents[2]
READY_S = 100.0
"""A tiny model loads in about 3 s, the real one in about 10; a busy machine takes longer, and the first process on a
machine compiles the kernels. Less than a test's time limit, so that a failure comes with the log."""
STOP_S = 20.0
_POLL_S = 0.05
_LOG_TAIL = 2000
_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""So that nothing is left when pytest itself is killed; becomes the program, same process id."""
_ids = itertools.count()


@dataclass
class Process:
    """One program. `env` is all it gets besides PATH and the like; no HEADRACE_ variable of the caller leaks in."""

    name: str
    command: list[str]
    env: dict[str, str]
    log_path: Path
    popen: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Starts the program; does not wait."""
        assert self.popen is None or self.popen.poll() is not None, f"{self.name} runs already"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_") and k != "REDIS_URL"}
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                [*_WITH_PARENT, *self.command],
                cwd=ROOT,
                env={**inherited, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        assert self.popen is not None, f"{self.name} was never started"
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone. Harmless when it has ended."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait(STOP_S)

    def stop(self) -> None:
        """SIGSTOP: the process hangs until `cont`."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM: drains; see `wait`."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, deadline_s: float = STOP_S) -> int:
        """Exit code. Fails with the log when the process still runs after `deadline_s`."""
        assert self.popen is not None, f"{self.name} was never started"
        try:
            return self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {deadline_s} s\n{self.log()}") from None

    def is_ready(self) -> bool:
        raise NotImplementedError

    def wait_ready(self, deadline_s: float = READY_S) -> None:
        """Fails with the log when the process ends, or is not ready in time."""

        def ready() -> bool:
            assert self.alive, f"{self.name} ended with code {self.wait()} before it was ready"
            return self.is_ready()

        try:
            eventually_sync(ready, deadline_s, interval=_POLL_S, what=f"{self.name} is ready")
        except AssertionError as error:
            error.add_note(self.log())
            raise

    def restart(self, deadline_s: float = READY_S) -> None:
        """Kills it if it runs, starts it again with the same name and port, waits until it is ready."""
        self.kill()
        self.start()
        self.wait_ready(deadline_s)

    async def restarted(self, deadline_s: float = READY_S) -> None:
        """The same while an event loop runs. Started in this thread: a program dies with the thread that began it."""
        self.kill()
        self.start()
        await asyncio.to_thread(self.wait_ready, deadline_s)

    def log(self) -> str:
        """The end of what it wrote."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return f"--- {self.name}\n{text[-_LOG_TAIL:]}"


P = TypeVar("P", bound="Process")


@dataclass
class Pod(Process):
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes."""
        return f"{self.url}/v1"

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2, trust_env=False).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


@dataclass
class Worker(Process):
    redis_url: str = ""
    worker_id: str = ""

    def card(self) -> WorkerCard | None:
        """Its heartbeat in Redis, None when there is none."""
        with redis.Redis.from_url(self.redis_url) as client:
            data = client.get(worker_key(self.worker_id))
        return msgspec.msgpack.decode(data, type=WorkerCard) if data else None

    def is_ready(self) -> bool:
        card = self.card()
        return card is not None and card.state == "ready" and card.pid == self.pid


class Stack:
    """`with Stack(redis_url, model, pods=2, workers=2) as stack:` everything is ready inside the block.

    `model` is a directory, a .gguf file or "" for the real default model. `env` goes to every process, `worker_env` and
    `pod_env` to one kind: {"HEADRACE_MAX_NUM_SEQS": "4"}. With `wait=False` nobody waits for readiness.
    """

    def __init__(
        self,
        redis_url: str,
        model: str | Path = "",
        *,
        pods: int = 1,
        workers: int = 1,
        env: Mapping[str, str] | None = None,
        pod_env: Mapping[str, str] | None = None,
        worker_env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        wait: bool = True,
    ) -> None:
        self.redis_url = redis_url
        self.pods: list[Pod] = []
        self.workers: list[Worker] = []
        self._model = str(model)
        self._env = {"HEADRACE_REDIS_URL": redis_url, **(env or {})}
        self._pod_env = dict(pod_env or {})
        self._worker_env = dict(worker_env or {})
        self._counts = (pods, workers)
        self._wait = wait
        self._temporary = tempfile.TemporaryDirectory(prefix="headrace-stack-") if log_dir is None else None
        self._log_dir = log_dir or Path(self._temporary.name if self._temporary else "")

    def __enter__(self) -> Self:
        pods, workers = self._counts
        try:
            for _ in range(workers):
                self.add_worker(wait=False)
            for _ in range(pods):
                self.add_pod(wait=False)
            if self._wait:
                self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.logs())
        self.close()

    def add_pod(self, env: Mapping[str, str] | None = None, *, wait: bool = True) -> Pod:
        """Starts one more pod on a free port."""
        name, port = f"pod-{len(self.pods)}", free_port()
        own = {**self._env, **self._pod_env, **(env or {}), "HEADRACE_HOST": "127.0.0.1", "HEADRACE_PORT": str(port)}
        pod = Pod(name, [sys.executable, "-m", "api_service"], own, self._log_dir / f"{name}.log", port)
        self.pods.append(pod)
        return self._started(pod, wait)

    def add_worker(self, env: Mapping[str, str] | None = None, *, wait: bool = True) -> Worker:
        """Starts one more worker, with a name of its own that it keeps over `restart`."""
        name = f"worker-{len(self.workers)}"
        worker_id = f"{name}-{os.getpid()}-{next(_ids)}"
        own = {
            "HEADRACE_KV_CACHE_MEMORY": "64M",
            "HEADRACE_THREADS": "1",
            **self._env,
            **self._worker_env,
            **(env or {}),
            "HEADRACE_MODEL": self._model,
            "HEADRACE_WORKER_ID": worker_id,
        }
        command = [sys.executable, "-m", "engine_worker"]
        worker = Worker(name, command, own, self._log_dir / f"{name}.log", self.redis_url, worker_id)
        self.workers.append(worker)
        return self._started(worker, wait)

    def wait_ready(self, deadline_s: float = READY_S) -> None:
        """Workers first: a pod is ready when there is a model."""
        for process in self._processes():
            process.wait_ready(deadline_s)

    def logs(self) -> str:
        return "\n".join(process.log() for process in self._processes())

    def close(self) -> None:
        """Kills what still runs, hung processes too. May be called twice."""
        for process in self._processes():
            process.kill()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _processes(self) -> list[Process]:
        return [*self.workers, *self.pods]

    @staticmethod
    def _started(process: P, wait: bool) -> P:
        process.start()
        if wait:
            process.wait_ready()
        return process
