"""How many streams a pod carries: python -m benchmarks.pod_load [--streams 500] [--tokens-per-s 5000] [--tokens 200]

A Redis, one pod and simulated workers (`headrace worker --simulate`) are started here; the client is a process of its
own. Out: whether every token of every stream arrived exactly once, the gaps between them, and the CPU time per streamed
token of pod, worker and Redis while all streams run (Linux's /proc).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headrace.embedded import find_server

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_READY_S = 60.0
_STOP_S = 10.0
_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""So that nothing is left when this process is killed; becomes the program, same process id."""


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of these processes so far, all threads, user and system."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * _TICK_S


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Programs:
    """Redis, workers and a pod; ended with the `with` block."""

    def __init__(self, folder: Path, workers: int, seqs: int, simulate: str, aof: bool) -> None:
        self.port = free_port()
        self._folder = folder
        socket_path = folder / "redis.sock"
        redis = [str(find_server()), "--port", "0", "--unixsocket", str(socket_path), "--dir", str(folder)]
        redis += ["--save", "", "--appendonly", "yes" if aof else "no", "--logfile", str(folder / "redis.log")]
        self._env = {**os.environ, "HEADRACE_REDIS_URL": f"unix://{socket_path}", "HEADRACE_LOG_LEVEL": "warning"}
        worker = {"HEADRACE_SIMULATE": simulate, "HEADRACE_MAX_NUM_SEQS": str(seqs)}
        pod = {"HEADRACE_PORT": str(self.port), "HEADRACE_MAX_STREAMS": "4096", "HEADRACE_MAX_QUEUE_REQUESTS": "4096"}
        self.processes: dict[str, list[subprocess.Popen[bytes]]] = {"redis": [self._start("redis", redis, {})]}
        commands = {"worker": [sys.executable, "-m", "engine_worker"], "pod": [sys.executable, "-m", "api_service"]}
        self.processes["worker"] = [self._start(f"worker{i}", commands["worker"], worker) for i in range(workers)]
        self.processes["pod"] = [self._start("pod", commands["pod"], pod)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu(self) -> dict[str, float]:
        return {kind: cpu_s([process.pid for process in group]) for kind, group in self.processes.items()}

    def wait_ready(self, workers: int) -> None:
        """Raises RuntimeError with the logs when it does not become ready."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=2) as reply:
                    if sum(card["state"] == "ready" for card in json.load(reply)["workers"]) >= workers:
                        return
            except OSError:  # URLError, which a 503 is too
                pass
            time.sleep(0.1)
        logs = [path.read_text(errors="replace")[-2000:] for path in sorted(self._folder.glob("*.log"))]
        raise RuntimeError("not ready:\n" + "\n".join(logs))

    def close(self) -> None:
        everything = [process for group in reversed(self.processes.values()) for process in group]
        for process in everything:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*_WITH_PARENT, *command], env={**self._env, **env}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )


def run_client(programs: Programs, streams: int, tokens: int) -> tuple[dict[str, Any], dict[str, float]]:
    """The client's findings, and CPU seconds of each kind of program while all streams ran."""
    command = [sys.executable, "-m", "benchmarks._pod_load.client", programs.url, str(streams), str(tokens)]
    marks: dict[str, dict[str, float]] = {}
    findings: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        for line in client.stdout:
            if line.startswith("{"):
                findings = json.loads(line)
            else:
                marks[line.strip()] = programs.cpu() | {"client": cpu_s([client.pid])}
    if client.returncode or not findings:
        raise RuntimeError(f"the client ended with code {client.returncode}")
    if findings["steady_s"] <= 0:  # the first stream had ended before the last one began
        return findings, {}
    return findings, {kind: used - marks["steady"][kind] for kind, used in marks["ending"].items()}


def main() -> int:
    """Exit code 1 when a token was lost, doubled or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens-per-s", type=float, default=5000, help="of all streams and workers together")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--aof", action="store_true", help="Redis writes its append-only file, as in production")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    # Without the second rate the first streams to start would have run through before the last ones begin.
    each = given.tokens_per_s / given.streams
    simulate = f"tokens_per_s={given.tokens_per_s / given.workers:g},stream_tokens_per_s={each:g}"
    seqs = -(-given.streams // given.workers)
    code = 0
    with tempfile.TemporaryDirectory(prefix="headrace-load-") as folder, ExitStack() as stack:
        programs = Programs(Path(folder), given.workers, seqs, simulate, given.aof)
        stack.callback(programs.close)
        programs.wait_ready(given.workers)
        for _ in range(given.rounds):
            findings, cpu = run_client(programs, given.streams, given.tokens)
            code = code or int(findings["exact"] != given.streams)
            report(findings, cpu, given.streams)
    return code


def report(findings: dict[str, Any], cpu: dict[str, float], streams: int) -> None:
    tokens, seconds = findings["steady_tokens"], findings["steady_s"]
    print(f"{findings['exact']} of {streams} streams exact, {findings['seconds']:.1f} s in all")
    for fault in findings["faults"]:
        print(f"  {fault}")
    if not cpu:
        print("the first stream ended before the last one had begun: give them more --tokens", flush=True)
        return
    rate = tokens / seconds
    print(f"while all ran: {tokens} tokens in {seconds:.1f} s, {rate:.0f} a second; gaps in ms: {findings['gaps_ms']}")
    shares = [
        f"{kind} {used / max(tokens, 1) * 1e6:.0f} us ({used / seconds:.0%} of a core)" for kind, used in cpu.items()
    ]
    print("CPU per streamed token:", ", ".join(shares), flush=True)


if __name__ == "__main__":
    sys.exit(main())
