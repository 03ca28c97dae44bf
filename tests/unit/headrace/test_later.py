"""Modules that are imported at first use, and which of them `serve` can wait with."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.later import later

LAZY = """
import sys
from headrace.later import later
module = later("headrace.chat")
print("httpx" in sys.modules)
import headrace.chat
print(headrace.chat is module, callable(module.run), "httpx" in sys.modules)
"""
COMMAND_LINE = """
import sys
import headrace.cli
print(sorted({"httpx", "redis", "rich"} & sys.modules.keys()))
"""


def _printed(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_a_module_runs_at_first_use() -> None:
    assert _printed(LAZY) == ["False", "True True True"]


def test_serve_starts_its_programs_before_it_imports_what_it_talks_to_them_with() -> None:
    assert _printed(COMMAND_LINE) == ["[]"]


def test_a_module_that_is_there_already_is_given_as_it_is() -> None:
    assert later("subprocess") is subprocess


def test_a_name_that_is_no_module_is_refused_at_once() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        later("headrace.no_such")
