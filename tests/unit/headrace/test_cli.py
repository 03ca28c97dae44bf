"""The console program as it is started from a shell."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace import __version__


def headrace(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_") and k != "REDIS_URL"}
    command = [sys.executable, "-m", "headrace", *arguments]
    env = {**clean, "COLUMNS": "200", **env}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=env, check=False)


def test_version() -> None:
    assert headrace("--version").stdout == f"headrace {__version__}\n"


@pytest.mark.parametrize("program", ["api", "worker"])
def test_a_program_of_its_own_asks_for_a_redis(program: str) -> None:
    run = headrace(program)
    assert run.returncode == 2
    assert "REDIS_URL" in run.stderr


def test_status_without_redis_says_where_it_looked(tmp_path: Path) -> None:
    run = headrace("status", "--redis-url", f"unix://{tmp_path}/none.sock")
    assert run.returncode == 1
    assert "none.sock cannot be reached" in run.stderr
    assert "Traceback" not in run.stderr


def test_status_with_several_servers_names_each(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for name in "ab":
            path = tmp_path / f"headrace-{name}" / "redis.sock"
            path.parent.mkdir()
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            server.listen()
        run = headrace("status", TMPDIR=str(tmp_path))
    assert run.returncode == 2
    for name in "ab":
        assert f"\n  --redis-url unix://{tmp_path}/headrace-{name}/redis.sock" in run.stderr


@pytest.mark.parametrize("given", ["", "\n \n"])
def test_key_id_without_a_key_says_so(given: str) -> None:
    run = headrace("key-id", stdin=given)
    assert (run.returncode, run.stdout) == (2, "")
    assert "no key came" in run.stderr
    assert headrace("key-id", stdin="secret\n").stdout.startswith("key-")


def test_a_data_directory_is_not_ignored_where_another_redis_keeps_the_data(tmp_path: Path) -> None:
    run = headrace("serve", "--data-dir", str(tmp_path), REDIS_URL="redis://127.0.0.1:1/0")
    assert run.returncode == 2
    assert "--data-dir is for the embedded Redis" in run.stderr


def test_status_prints_json(redis_url: str) -> None:
    run = headrace("status", "--json", REDIS_URL=redis_url)
    assert run.returncode == 0
    assert '"workers": []' in run.stdout


def test_a_bad_value_is_refused_before_anything_starts() -> None:
    run = headrace("serve", "--max-num-seqs", "0")
    assert run.returncode == 2
    assert "--max-num-seqs" in run.stderr
    assert "from 1 to 4096" in run.stderr


@pytest.mark.parametrize("command", ["serve", "worker"])
@pytest.mark.parametrize("value", ["fast", "tokens_per_s=0", "ttft_ms=5"])
def test_a_pace_that_makes_no_sense_is_refused_with_what_is_allowed(command: str, value: str) -> None:
    for run in (headrace(command, "--simulate", value), headrace(command, HEADRACE_SIMULATE=value)):
        assert run.returncode == 2
        assert "simulate" in run.stderr.lower()
        assert "tokens_per_s" in run.stderr


def test_a_redis_that_does_not_answer_ends_serve_with_its_name_but_not_its_password(tmp_path: Path) -> None:
    run = headrace("serve", "--port", "0", "--redis-url", "redis://:secret@127.0.0.1:1/0")
    assert run.returncode == 1
    assert "redis://:***@127.0.0.1:1/0 does not answer" in run.stderr
    assert ".." not in run.stderr
    assert "secret" not in run.stderr
