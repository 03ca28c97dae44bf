"""Supervised processes, tried with real ones: restart, stop, and what happens when the supervisor itself is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.children import Child, Guard, StartFailure
from headrace.guard import alive
from tests.support.wait import eventually, eventually_sync

PATIENT = "import time; time.sleep(600)"
DEAF = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


@pytest.fixture
def guard() -> Iterator[Guard]:
    made = Guard()
    yield made
    made.close()


def child(guard: Guard, code: str, said: list[str], **more: bool) -> Child:
    made = Child("thing", [sys.executable, "-c", code], dict(os.environ), guard, said.append)
    made.settled = more.get("settled", False)
    return made


def lines_of(path: Path, count: int) -> list[str]:
    """Lines of a file once there are `count`, before that an empty list."""
    lines = path.read_text().splitlines() if path.exists() else []
    return lines if len(lines) >= count else []


def gone(pids: list[int]) -> bool:
    return not any(alive(pid) and not _zombie(pid) for pid in pids)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_an_exit_before_the_service_was_ready_is_a_failure_with_its_code(guard: Guard) -> None:
    made = child(guard, "raise SystemExit(2)", [])
    with pytest.raises(StartFailure, match="thing exited with code 2") as failure:
        await made.start()
    assert failure.value.code == 2


async def test_a_settled_child_is_started_again_until_it_is_stopped(guard: Guard, tmp_path: Path) -> None:
    said: list[str] = []
    log = tmp_path / "log"
    code = f"import os; open({str(log)!r}, 'a').write(f'{{os.getpid()}}\\n'); os.kill(os.getpid(), 9)"
    made = child(guard, code, said, settled=True)
    made.start()
    lines = await eventually(lambda: lines_of(log, 2), 20)
    await made.stop(5)
    assert len(set(lines)) == len(lines)
    assert "thing was ended by signal 9; starting it again in 0.5 s" in said[0]


async def test_stop_kills_a_child_that_does_not_listen(guard: Guard, tmp_path: Path) -> None:
    said: list[str] = []
    log = tmp_path / "log"
    code = DEAF.replace("print('deaf', flush=True)", f"open({str(log)!r}, 'w').write('deaf\\n')")
    made = child(guard, code, said, settled=True)
    task = made.start()
    await eventually(lambda: lines_of(log, 1), 20)
    await made.stop(0.2)
    assert task.done()
    assert said == ["thing did not stop within 0.2 s; killing it"]


async def test_a_killed_child_is_not_started_again(guard: Guard, tmp_path: Path) -> None:
    """A second Ctrl-C ends them all; none of them may come back, or be said to."""
    said: list[str] = []
    log = tmp_path / "log"
    made = child(guard, f"open({str(log)!r}, 'w').write('up\\n'); {PATIENT}", said, settled=True)
    task = made.start()
    await eventually(lambda: lines_of(log, 1), 20)
    made.kill()
    await asyncio.wait_for(task, 20)
    assert said == []


async def test_stop_during_start_leaves_nothing(guard: Guard) -> None:
    made = child(guard, PATIENT, [])
    task = made.start()
    await asyncio.sleep(0)  # the process is being made right now
    await made.stop(10)
    assert task.done()


SUPERVISOR = """
import asyncio, os, sys
from headrace.children import Child, Guard
async def main(directory, codes):
    guard = Guard(directory)
    for code in codes:
        Child("c", [sys.executable, "-c", code], dict(os.environ), guard, print).start()
    await asyncio.sleep(600)
asyncio.run(main(sys.argv[1], sys.argv[2:]))
"""


@pytest.mark.parametrize("also_guard", [False, True], ids=["supervisor killed", "supervisor and guard killed"])
def test_tp_03_children_die_with_a_killed_supervisor(tmp_path: Path, also_guard: bool) -> None:
    log, private = tmp_path / "log", tmp_path / "private"
    private.mkdir()
    note = f"import os; open({str(log)!r}, 'a').write(f'{{os.getpid()}}\\n'); "
    codes = [note + PATIENT] if also_guard else [note + PATIENT, note + DEAF]
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(private), *codes])
    pids = [int(line) for line in eventually_sync(lambda: lines_of(log, len(codes)), 20)]
    guards = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
    guards = [int(pid) for pid in guards if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(guards) == 1
    if also_guard:
        os.kill(guards[0], signal.SIGKILL)
    supervisor.kill()
    supervisor.wait()
    eventually_sync(lambda: gone([*pids, *guards]), 3.0, what="children end with their supervisor")
    assert also_guard or not private.exists()
