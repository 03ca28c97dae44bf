"""What `headrace serve` decides before it starts anything."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.ready import base_url, ready_text
from headrace.serve import Refused, claim_port, cores_line, engine_threads, give_way, without_password


def test_a_taken_port_is_refused_by_number_and_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=rf"port {port} on 127\.0\.0\.1 is already in use.*--port"):
            claim_port("127.0.0.1", port)


def test_port_0_is_a_free_port() -> None:
    port = claim_port("127.0.0.1", 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_an_address_that_is_not_ours_is_refused_by_flag() -> None:
    with pytest.raises(Refused, match="--host"):
        claim_port("192.0.2.1", 8000)


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, 1, 0), (2, 1, 0), (7, 1, 6), (8, 1, 6), (16, 1, 14), (2, 2, 1), (16, 2, 7), (1, 4, 1)],
)
def test_cores_are_shared_between_engines_and_the_rest(cores: int, workers: int, threads: int) -> None:
    assert engine_threads(cores, workers) == threads
    assert engine_threads(cores, workers, 3) == 3, "what the person chose holds"


@pytest.mark.parametrize(
    ("cores", "workers", "chosen", "line"),
    [
        (2, 1, 0, "engine threads: 2 in each of 1 worker(s); API and Redis share the cores with them"),
        (2, 2, 0, "engine threads: 1 in each of 2 worker(s); API and Redis share the cores with them"),
        (16, 2, 0, "engine threads: 7 in each of 2 worker(s); 2 core(s) for API and Redis"),
        (16, 1, 4, "engine threads: 4 in each of 1 worker(s); 12 core(s) for API and Redis"),
    ],
)
def test_the_split_of_cores_is_told_as_it_will_be(cores: int, workers: int, chosen: int, line: str) -> None:
    assert cores_line(cores, workers, chosen) == f"cores: {cores}; {line}"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://me:secret@host/1", "rediss://me:***@host/1"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("unix:///tmp/x/redis.sock", "unix:///tmp/x/redis.sock"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("cores", "workers", "chosen", "gives"),
    [(2, 1, 0, True), (1, 1, 0, True), (8, 1, 0, False), (8, 2, 4, True), (2, 1, 1, False), (4, 1, 0, False)],
)
def test_programs_give_way_where_engine_threads_share_their_cores(
    cores: int, workers: int, chosen: int, gives: bool
) -> None:
    with ThreadPoolExecutor(1) as pool:  # of its own: a policy is a thread's
        pool.submit(give_way, cores, workers, chosen).result()
        child = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)"]
        inherited = pool.submit(subprocess.check_output, child, text=True).result()
    assert inherited.strip() == str(gives)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],
)
def test_the_url_that_is_shown_can_be_called(host: str, url: str) -> None:
    assert base_url(host, 80) == url


def test_the_curl_line_carries_the_key_and_survives_the_shell() -> None:
    text = ready_text("http://h:1", "it's", {"HEADRACE_API_KEY": "k1,k2"}, "redis://h")
    assert "'Authorization: Bearer k1'" in text
    assert """it'"'"'s""" in text
