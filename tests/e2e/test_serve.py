"""`headrace serve` as a person runs it: one command, a line that works, nothing left behind, whoever is killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_port
from tests.support.tiny_model import make_tiny_llama
from tests.support.wait import eventually_sync

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60
STOP_S = 30
LONG = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


class Serve:
    """One run of the command, on a port of its own."""

    def __init__(self, folder: Path, *arguments: str, port: int | None = None, terminal: int | None = None) -> None:
        """terminal: the descriptor of one to run on instead of a log file."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"serve-{self.port}.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_") and k != "REDIS_URL"}
        # Its own folder for temporary files shows whether any is left.
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        slow = {"HEADRACE_FAULT": "step-delay-ms:5"}  # so that a stream lasts long enough to be disturbed
        env = {**inherited, **slow, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "headrace", "serve", *arguments, "--port", str(self.port)]
        with self._log.open("wb") as log:
            if terminal is None:
                self.popen = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            else:
                command = ["setsid", "--ctty", *command]
                self.popen = subprocess.Popen(command, env=env, stdin=terminal, stdout=terminal, stderr=terminal)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.popen.poll() is None, self.output()
            return "Headrace is ready" in self.output()

        eventually_sync(ready, READY_S, what="serve says that it is ready")

    def children(self) -> dict[str, int]:
        """Process ids of what it started, by kind."""
        found = {}
        for pid in Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except FileNotFoundError:  # it has ended since
                continue
            kinds = ("valkey-server", "redis-server", "engine_worker", "api_service", "guard.py")
            found |= {kind.replace("valkey", "redis"): int(pid) for kind in kinds if kind in line}
        return found

    def wait_exit(self) -> int:
        try:
            return self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"serve still runs\n{self.output()}") from None


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_nothing_left(serve: Serve, children: dict[str, int], within_s: float = 0.5) -> None:
    eventually_sync(lambda: not any(map(running, children.values())), within_s, what=f"{children} ended")
    eventually_sync(lambda: not list(serve.temporary.glob("headrace-*")), within_s, what="temporary folder removed")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", serve.port))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def serve(tmp_path: Path, model: Path) -> Iterator[Serve]:
    made = Serve(tmp_path, str(model), "--served-model-name", "tiny", "--kv-cache-memory", "64M")
    try:
        made.wait_ready()
        yield made
    finally:
        made.popen.kill()  # the guard ends the rest
        made.popen.wait()


def complete(serve: Serve) -> str:
    answer = httpx.post(f"{serve.url}/v1/completions", json=LONG, timeout=60, trust_env=False)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def test_the_curl_line_that_is_printed_works(serve: Serve) -> None:
    [line] = re.findall(r"^curl (?:.*\\\n)*.*$", serve.output(), re.MULTILINE)
    run = subprocess.run(
        ["bash", "-c", f"{line} --silent --show-error --max-time 60"], capture_output=True, text=True, check=True
    )
    assert "chat.completion.chunk" in run.stdout
    assert run.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_leaves_nothing(serve: Serve, number: signal.Signals) -> None:
    children = serve.children()
    assert set(children) == {"redis-server", "engine_worker", "api_service", "guard.py"}
    body = {**LONG, "stream": True}
    with httpx.stream("POST", f"{serve.url}/v1/completions", json=body, timeout=60, trust_env=False) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("id:")
        serve.popen.send_signal(number)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""], "the stream that ran was not finished"
    assert serve.wait_exit() == 0
    assert "headrace: stopped." in serve.output()
    assert_nothing_left(serve, children)


def test_a_terminal_that_is_closed_stops_it_too(tmp_path: Path, model: Path) -> None:
    """What it says then cannot be written any more."""
    screen, terminal = os.openpty()
    os.set_blocking(screen, False)
    serve = Serve(tmp_path, str(model), "--served-model-name", "tiny", "--kv-cache-memory", "64M", terminal=terminal)
    try:
        os.close(terminal)
        shown = b""

        def ready() -> bool:
            nonlocal shown
            with suppress(BlockingIOError):
                shown += os.read(screen, 1 << 16)
            return b"Headrace is ready" in shown

        eventually_sync(ready, READY_S, what="serve says that it is ready")
        children = serve.children()
        os.close(screen)
        serve.wait_exit()
        assert_nothing_left(serve, children)
    finally:
        serve.popen.kill()
        serve.popen.wait()


def test_tp_03_a_killed_supervisor_takes_everything_along(serve: Serve, tmp_path: Path, model: Path) -> None:
    children = serve.children()
    serve.popen.kill()
    serve.popen.wait()
    assert_nothing_left(serve, children, within_s=3)
    again = Serve(tmp_path, str(model), "--served-model-name", "tiny", "--kv-cache-memory", "64M", port=serve.port)
    try:
        again.wait_ready()
    finally:
        again.popen.kill()
        again.popen.wait()


@pytest.mark.parametrize("victim", ["engine_worker", "redis-server", "api_service"])
def test_what_dies_is_started_again(serve: Serve, victim: str) -> None:
    expected = complete(serve)
    before = serve.children()
    os.kill(before[victim], signal.SIGKILL)
    eventually_sync(lambda: serve.children().get(victim, before[victim]) != before[victim], 30, what=f"a new {victim}")

    def answers() -> bool:
        try:
            return complete(serve) == expected
        except httpx.HTTPError:
            return False  # the pod is away, or says 503 while Redis or the worker is

    eventually_sync(answers, 60, interval=0.2, what="the same answer as before")
    after = serve.children()
    assert {kind for kind in before if before[kind] != after[kind]} == {victim}


def test_a_stream_goes_on_after_its_worker_was_killed(serve: Serve) -> None:
    expected = complete(serve)
    worker = serve.children()["engine_worker"]
    body, text = {**LONG, "stream": True}, ""
    with httpx.stream("POST", f"{serve.url}/v1/completions", json=body, timeout=60, trust_env=False) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
                if len(text) > 20 and running(worker):
                    os.kill(worker, signal.SIGKILL)
    assert text == expected
    assert serve.children()["engine_worker"] != worker


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        serve = Serve(tmp_path, port=taken.getsockname()[1])
        assert serve.wait_exit() == 1
    assert f"port {serve.port} on 127.0.0.1 is already in use" in serve.output()
    assert serve.output().count("\n") == 1


def test_a_model_that_is_not_there_ends_serve_with_the_reason(tmp_path: Path) -> None:
    serve = Serve(tmp_path, str(tmp_path / "no-such-model"))
    assert serve.wait_exit() == 2
    assert "no-such-model" in serve.output()
    assert serve.output().count("\n") == 1, "something was started"
