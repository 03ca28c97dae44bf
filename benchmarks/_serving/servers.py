"""Servers under test: started from a command, paused while another one is measured, stopped. Linux only (/proc).

In: a shell command with `{port}`. All servers stay loaded for the whole run and are stopped with SIGSTOP in turns, so
that rounds can alternate without loading a model each time and nothing else runs beside the one that is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Server"]

_START_S = 300.0
_STOP_S = 20.0
_RESUME_S = 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Server:
    """`command` runs in a shell of its own session; it serves `model` at 127.0.0.1:{port}."""

    name: str
    command: str
    model: str
    log: Path
    port: int = 0
    popen: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when /v1/models lists the model; raises RuntimeError with the log's end when it does not."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = self.port or probe.getsockname()[1]
        with self.log.open("wb") as log:
            command = ["/bin/sh", "-c", "exec " + self.command.replace("{port}", str(self.port))]
            self.popen = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._wait(_START_S)

    def pause(self) -> None:
        """Nothing of it runs until `resume`."""
        for pid in self._pids():
            _send(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Runs again; returns when it answers."""
        for pid in reversed(self._pids()):
            _send(pid, signal.SIGCONT)
        self._wait(_RESUME_S)

    def stop(self) -> None:
        """Ends every process of it."""
        pids = self._pids()
        if self.popen is None:
            return
        for pid in reversed(pids):
            _send(pid, signal.SIGCONT)
        self.popen.terminate()
        try:
            self.popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
        for pid in pids:
            _send(pid, signal.SIGKILL)
        self.popen = None

    def memory_mib(self) -> float:
        """Resident size of all its processes; pages they share are counted for each."""
        return sum(_resident(pid) for pid in self._pids()) / 2**20

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.popen is None or self.popen.poll() is not None:
                break
            if self._answers():
                return
            time.sleep(0.05)
        tail = self.log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{self.name} does not answer at {self.url}:\n{tail}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=2) as reply:
                return self.model.encode() in reply.read()
        except OSError:  # URLError is one
            return False

    def _pids(self) -> list[int]:
        """The process and all below it, parents first."""
        if self.popen is None:
            return []
        found = [self.popen.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
        return found


def _send(pid: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, which)


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0
