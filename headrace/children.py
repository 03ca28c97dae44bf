"""Child processes of the supervisor: none outlives it, each is restarted with back-off and stopped in time.

In: a name, a command, an environment. Out: a running program, its exit code when it ends. Owns the processes and
nothing else; who starts when, and in which order they stop, is serve.py's.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace import guard

__all__ = ["Child", "Guard", "StartFailure", "program"]

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
HEALTHY_S = 60.0
"""A child that lived this long starts again at the first back-off."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class StartFailure(Exception):
    """A program ended before the service was ready. `code` is its exit code (negative: the signal)."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} {_how(code)} before the service was ready; its own lines above say why")
        self.name = name
        self.code = code


def program(module: str) -> list[str]:
    """Command that runs one of our programs with this Python. -P: a folder named `shared` where the user happens to be
    must not hide ours."""
    return [sys.executable, "-P", "-m", module]


class Guard:
    """The process that ends the children if this one is killed (see guard.py), and removes `directory` ("" = none)."""

    def __init__(self, directory: str = "") -> None:
        command = [sys.executable, "-I", str(Path(guard.__file__)), directory]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def tell(self, sign: str, pid: int) -> None:
        """`sign` "+" for a child that began, "-" for one that ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{sign}{pid}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # somebody killed the guard; the kernel's parent-death signal still stands

    def close(self) -> None:
        """Lets it end. All children must have ended before."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=guard.GRACE_S + 5)


def _die_with_parent(parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent died in between, so no signal will come

    return before_exec


@dataclass
class Child:
    """One supervised program. `ended` is told of every exit that nobody asked for, with the exit code."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    guard: Guard
    say: Callable[[str], None]
    ended: Callable[[int], Awaitable[None]] | None = None
    settled: bool = False
    """False: an exit is a failure to start and ends `task` with StartFailure. True (set by the supervisor): it is
    restarted."""
    task: asyncio.Task[None] | None = field(default=None, init=False)
    launched: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when the program runs for the first time; never when it cannot be run, which `task` ends with."""
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def start(self) -> asyncio.Task[None]:
        """Keeps the program running until `stop`. The task ends then, or with StartFailure or OSError."""
        self.task = asyncio.create_task(self._keep_running(), name=self.name)
        return self.task

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, up to `grace_s` seconds to drain, then SIGKILL. Returns when the program has ended."""
        self._stopping.set()
        if self.task is None:
            return
        self.signal(signal.SIGTERM)
        _, running = await asyncio.wait({self.task}, timeout=grace_s)
        if running:
            self.say(f"{self.name} did not stop within {grace_s:g} s; killing it")
            self.signal(signal.SIGKILL)
            await asyncio.wait({self.task})

    def kill(self) -> None:
        """Ends the program at once; it is not started again."""
        self._stopping.set()
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Sends a signal to the program; nothing happens when it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _keep_running(self) -> None:
        backoff = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            if not self.settled:
                raise StartFailure(self.name, code)
            if self.ended is not None:
                await self.ended(code)
            backoff = FIRST_BACKOFF_S if loop.time() - began > HEALTHY_S else backoff
            self.say(f"{self.name} {_how(code)}; starting it again in {backoff:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff)
            backoff = min(backoff * 2, MAX_BACKOFF_S)

    async def _run_once(self) -> int:
        # A session of its own, so that a terminal's Ctrl-C reaches the supervisor alone and draining keeps its order.
        process = await asyncio.create_subprocess_exec(
            *self.command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        self._process = process
        self.launched.set()
        self.guard.tell("+", process.pid)
        if self._stopping.is_set():  # asked to stop while it was being started
            process.terminate()
        code = await process.wait()
        self.guard.tell("-", process.pid)
        return code


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
