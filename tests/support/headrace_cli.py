"""The `headrace` command as a person runs it, against a given Redis."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["run_headrace"]

ROOT = Path(__file__).resolve().parents[2]


def run_headrace(redis_url: str, *arguments: str) -> str:
    """What it prints; it must succeed."""
    command = [sys.executable, "-m", "headrace", *arguments, "--redis-url", redis_url]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout
