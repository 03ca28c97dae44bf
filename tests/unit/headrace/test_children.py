"""Supervised processes, tried with real ones: restart, stop, and what happens when the supervisor itself is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.children import Child, Guard, StartFailure
from headrace.guard import alive

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


async def seen(path: Path, count: int, deadline_s: float = 20) -> list[str]:
    """Lines of a file, once there are `count`."""
    end = time.monotonic() + deadline_s
    while True:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return lines
        assert time.monotonic() < end, f"{lines} after {deadline_s} s"
        await asyncio.sleep(0.02)


def gone(pids: list[int], deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while any(alive(pid) and not _zombie(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


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
    lines = await seen(log, 2)
    await made.stop(5)
    assert len(set(lines)) == len(lines)
    assert "thing was ended by signal 9; starting it again in 0.5 s" in said[0]


async def test_stop_kills_a_child_that_does_not_listen(guard: Guard, tmp_path: Path) -> None:
    said: list[str] = []
    log = tmp_path / "log"
    code = DEAF.replace("print('deaf', flush=True)", f"open({str(log)!r}, 'w').write('deaf\\n')")
    made = child(guard, code, said, settled=True)
    task = made.start()
    await seen(log, 1)
    await made.stop(0.2)
    assert task.done()
    assert said == ["thing did not stop within 0.2 s; killing it"]


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
async def test_tp_03_children_die_with_a_killed_supervisor(tmp_path: Path, also_guard: bool) -> None:
    log, private = tmp_path / "log", tmp_path / "private"
    private.mkdir()
    note = f"import os; open({str(log)!r}, 'a').write(f'{{os.getpid()}}\\n'); "
    codes = [note + PATIENT] if also_guard else [note + PATIENT, note + DEAF]
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(private), *codes])
    pids = [int(line) for line in await seen(log, len(codes))]
    guards = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
    guards = [int(pid) for pid in guards if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(guards) == 1
    if also_guard:
        os.kill(guards[0], signal.SIGKILL)
    supervisor.kill()
    supervisor.wait()
    assert gone(pids, 3.0)
    assert gone(guards, 3.0)
    assert also_guard or not private.exists()
