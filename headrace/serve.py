"""`headrace serve`: everything in one command. Redis if there is none, workers, a pod; watched, restarted, drained.

In: the flags that were set. Out: a service at http://host:port until a signal comes, and nothing left behind. Order of
the end: the pod stops taking requests and finishes its streams, workers hand back what they run, Redis goes last.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace import __version__
from headrace.children import Child, Guard, StartFailure, program
from headrace.embedded import BadDirectory, EmbeddedServer, NoServer
from headrace.later import later
from headrace.ready import authorization, base_url, ready_text

if TYPE_CHECKING:
    from headrace import contact
else:
    contact = later("headrace.contact")

__all__ = ["Plan", "Refused", "claim_port", "cores_line", "engine_threads", "give_way", "run", "without_password"]

REDIS_START_S = 30.0
"""A long append-only file takes a while to load."""
REDIS_CONNECT_S = 3.0
REDIS_STOP_S = 10.0
_REDIS = "redis"
_ROOMY = 8
STOP_MARGIN_S = 5.0
"""What a program gets beyond its own drain time before it is killed."""


class Refused(Exception):
    """Nothing was started; the message says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """What to start. `settings`: the programs' environment variables that flags or the environment set."""

    settings: dict[str, str]
    workers: int = 1
    data_dir: str | None = None

    @property
    def host(self) -> str:
        return self.settings.get("HEADRACE_HOST", "127.0.0.1")

    @property
    def redis_url(self) -> str | None:
        return self.settings.get("HEADRACE_REDIS_URL")

    @property
    def simulated(self) -> bool:
        """Nothing is computed, so there are no engine threads."""
        return "HEADRACE_SIMULATE" in self.settings

    @property
    def threads(self) -> int:
        """Of each engine; 0 = ours to choose."""
        return int(self.settings.get("HEADRACE_THREADS", "0"))

    @property
    def pod_stop_s(self) -> float:
        return float(self.settings.get("HEADRACE_DRAIN_TIMEOUT_S", "10")) + STOP_MARGIN_S

    @property
    def worker_stop_s(self) -> float:
        return int(self.settings.get("HEADRACE_DRAIN_TIMEOUT_MS", "2000")) / 1000 + STOP_MARGIN_S


def say(line: str) -> None:
    """One line for the person at the terminal, if there still is one; standard output stays free."""
    with suppress(OSError):  # the terminal was closed: what has to be done must not fail for want of a reader
        print(f"headrace: {line}", file=sys.stderr, flush=True)


def claim_port(host: str, port: int) -> int:
    """The port to listen on: `port`, or a free one for 0. Raises Refused when it cannot be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Refused(
                f"port {port} on {host} is already in use. Stop the program that has it, or take another (--port)"
            ) from error
        raise Refused(f"cannot listen on {host} port {port} (--host, --port): {error.strerror}") from error


def engine_threads(cores: int, workers: int, chosen: int = 0) -> int:
    """Threads of each worker's engine, 0 = the engine's own choice (one a core). `chosen` by the person, or 0.

    From eight cores on two are left to the pod and Redis, below that one, except where there are so few that the engine
    would miss it more: then all share them, and the engine's threads give way (see `_worker_settings`).
    """
    if chosen or (workers == 1 and cores <= 2):
        return chosen
    return max(1, (cores - (2 if cores >= _ROOMY else 1)) // workers)


def give_way(cores: int, workers: int, chosen: int) -> None:
    """Where programs share their cores with engine threads, they wait until these offer one, many times a step
    (decision 0011): a thread that lost its core within a task would hold up all others. Children inherit it."""
    if (engine_threads(cores, workers, chosen) or cores) * workers < cores:
        return
    with suppress(AttributeError, OSError):  # not Linux, or not allowed here: then they take turns as programs do
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url


class _Service:
    """The running whole. `run` returns when a signal came and all is drained."""

    def __init__(self, plan: Plan, port: int, server: EmbeddedServer | None, guard: Guard) -> None:
        self._plan = plan
        self._port = port
        self._server = server
        self._guard = guard
        self._url = server.url if server else str(plan.redis_url)
        self._redis: Child | None = None
        self._workers: list[Child] = []
        self._pod: Child | None = None
        self._model = ""
        self._stop = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Raises StartFailure or Refused when it cannot come up; either way everything that was started has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._asked_to_stop)
        stopped: asyncio.Future[Any] = asyncio.create_task(self._stop.wait())
        up: asyncio.Future[Any] = asyncio.create_task(self._bring_up())
        try:
            await asyncio.wait([stopped, up, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                up.result()
                await asyncio.wait([stopped, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        finally:
            up.cancel()
            stopped.cancel()
            await asyncio.wait({up, stopped})
            self._failed.cancel()
            await self._shut_down()

    def _asked_to_stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            say("stopping; streams may finish (Ctrl-C again to stop at once)")
            return
        for child in self._children():
            child.kill()

    def _children(self) -> list[Child]:
        return [child for child in (self._pod, *self._workers, self._redis) if child is not None]

    def _start(self, name: str, command: list[str], variables: dict[str, str]) -> Child:
        env = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
        child = Child(name, command, env, self._guard, say)
        child.start().add_done_callback(self._child_ended)
        return child

    def _child_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _bring_up(self) -> None:
        """Everything at once (only a Redis of the user's has to be there before), then wait until a request would be
        answered, and say so."""
        if self._server is None:
            await self._expect_redis(REDIS_CONNECT_S)
        else:
            self._redis = self._start(_REDIS, self._server.command(), {})
        settings = {**self._plan.settings, "HEADRACE_REDIS_URL": self._url, "HEADRACE_PORT": str(self._port)}
        for index in range(self._plan.workers):
            own = self._worker_settings(settings, index)
            worker = self._start(f"worker {index + 1}", program("engine_worker"), own)
            worker.ended = partial(self._release, own["HEADRACE_WORKER_ID"])
            self._workers.append(worker)
        self._pod = self._start("api", program("api_service"), settings)
        for child in self._children():
            await child.launched.wait()
        if self._server is not None:
            await self._expect_redis(REDIS_START_S)
        url = base_url(self._plan.host, self._port)
        self._model = model = await contact.wait_ready(url, authorization(settings))
        for child in self._children():
            child.settled = True
        shown = None if self._server else without_password(self._url)
        print(ready_text(url, model, settings, shown), flush=True)

    async def _expect_redis(self, deadline_s: float) -> None:
        """Raises Refused when Redis does not answer within `deadline_s` seconds."""
        trouble = await contact.ping(self._url, deadline_s)
        if trouble is not None:
            raise Refused(
                f"Redis at {without_password(self._url)} does not answer: {trouble.rstrip('.')}. Start it, or leave "
                "--redis-url and REDIS_URL unset to get an embedded one"
            )

    def _worker_settings(self, settings: dict[str, str], index: int) -> dict[str, str]:
        threads = engine_threads(_cores(), self._plan.workers, self._plan.threads)
        # A name that outlives the process: started again, it finds its own requests without waiting for the lease.
        name = settings.get("HEADRACE_WORKER_ID") or f"{socket.gethostname()}-{os.getpid()}"
        suffix = f"-{index + 1}" if self._plan.workers > 1 else ""
        return {**settings, "HEADRACE_THREADS": str(threads), "HEADRACE_WORKER_ID": name + suffix}

    async def _release(self, worker_id: str, _code: int) -> None:
        """A worker is surely gone: others may take over what it ran now, not after a lease."""
        shards = int(self._plan.settings.get("HEADRACE_SHARDS", "1"))
        trouble = await contact.release(self._url, worker_id, self._model, shards)
        if trouble is not None:
            say(f"requests of {worker_id} wait for their lease: {trouble}")

    async def _shut_down(self) -> None:
        if self._pod is not None:
            await self._pod.stop(self._plan.pod_stop_s)
        await asyncio.gather(*(worker.stop(self._plan.worker_stop_s) for worker in self._workers))
        if self._redis is not None:
            await self._redis.stop(REDIS_STOP_S)


def cores_line(cores: int, workers: int, chosen: int) -> str:
    """How the cores are split, for the person at the terminal. chosen: --threads, 0 = ours to choose."""
    threads = engine_threads(cores, workers, chosen) or cores
    left = cores - threads * workers
    rest = f"{left} core(s) for API and Redis" if left > 0 else "API and Redis share the cores with them"
    return f"cores: {cores}; engine threads: {threads} in each of {workers} worker(s); {rest}"


def _announce(plan: Plan, server: EmbeddedServer | None) -> None:
    default = "simulated" if plan.simulated else "SmolLM2-135M-Instruct (default)"
    model = plan.settings.get("HEADRACE_MODEL") or default
    say(f"version {__version__}, model {model}{', every token made up (--simulate)' if plan.simulated else ''}")
    say(f"redis: {f'embedded, {server.url}' if server else without_password(str(plan.redis_url))}")
    if not plan.simulated:
        say(cores_line(_cores(), plan.workers, plan.threads))


async def _serve(plan: Plan) -> None:
    port = claim_port(plan.host, int(plan.settings.get("HEADRACE_PORT", "8000")))
    server = None if plan.redis_url else EmbeddedServer.prepare(plan.data_dir)
    guard = Guard(str(server.directory) if server else "")
    try:
        _announce(plan, server)
        if not plan.simulated:
            give_way(_cores(), plan.workers, plan.threads)
        await _Service(plan, port, server, guard).run()
    except StartFailure as failure:
        if server is not None and failure.name == _REDIS:
            print(server.last_words(), file=sys.stderr)
        raise
    finally:
        guard.close()
        if server is not None:
            server.remove()


def run(plan: Plan) -> int:
    """Serves until a signal. Exit code: 0 stopped as asked, 1 it could not start, 2 a program refused its settings."""
    try:
        asyncio.run(_serve(plan))
    except StartFailure as failure:
        say(f"{failure}.")
        return 2 if failure.code == 2 else 1
    except (Refused, BadDirectory, NoServer, OSError) as error:
        say(f"{error}.")
        return 2 if isinstance(error, BadDirectory) else 1
    say("stopped.")
    return 0
