"""A run's last lines say why a test failed, also when its second try passed, and what it stood on is made anew."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.renewed import Renewed
from tests.support.stack import ROOT

CONFTEST = """
from tests.support.reasons import PROCESS_LOGS, Reasons
import pytest

def pytest_configure(config):
    config.pluginmanager.register(Reasons())

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        report.sections.append((PROCESS_LOGS, "--- worker-0\\nearly\\n" + "late\\n" * 4 + "--- pod-0\\nhello\\n"))
    return report
"""
TESTS = """
tries = []

def test_flaky():
    tries.append(1)
    print("captured words")
    assert len(tries) == 2

def test_fine():
    pass
"""


def test_the_first_try_of_a_test_that_passed_in_the_end_is_explained(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--reruns", "1"]
    run = subprocess.run(
        [*command, str(tmp_path)],
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout
    told = run.stdout.split("why tests failed")[1]
    assert "test_it.py::test_flaky (call; failed tries: 1)" in told
    assert "assert 1 == 2" in told
    assert "Captured stdout call: captured words" in told
    assert "worker-0: late" in told
    assert "pod-0: hello" in told
    assert "early" not in told


def test_nothing_is_said_of_a_run_without_failures(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text("def test_fine(): pass")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    run = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=60, check=True
    )
    assert "why tests failed" not in run.stdout


def test_what_is_spoilt_is_ended_and_made_anew() -> None:
    seen: list[str] = []

    @contextmanager
    def make():  # type: ignore[no-untyped-def]
        seen.append("begun")
        yield len(seen)
        seen.append("ended")

    renewed: Renewed[int] = Renewed(make)
    assert renewed.get() == renewed.get() == 1
    renewed.spoilt = True
    assert seen == ["begun"]
    assert renewed.get() == 3
    renewed.close()
    renewed.close()
    assert seen == ["begun", "ended"] * 2


def test_one_that_could_not_be_made_is_tried_again() -> None:
    attempts: list[int] = []

    @contextmanager
    def make():  # type: ignore[no-untyped-def]
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no room")
        yield "made"

    renewed: Renewed[str] = Renewed(make)
    with pytest.raises(OSError, match="no room"):
        renewed.get()
    assert renewed.get() == "made"
    renewed.close()
