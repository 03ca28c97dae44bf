"""What other people's clients are tried on: a pod with a key beside the real stack. Nobody else may be called.

The clients' own reports home are switched off here, before their modules are imported; an audit hook writes down every
address beyond this machine that Python code asks for all the same, from here on and while a test runs.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import Pod, Stack

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}

KEY = "sk-clients"
COLOR: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": ["teal"]}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "pick_color", "description": "Picks.", "parameters": COLOR}}
"""A call of it can only be `{"color": "teal"}`, whatever a small model would rather say."""
CAPITAL = "What is the capital of France?"

OUTSIDE: list[str] = []
"""Addresses beyond this machine that Python code of this process asked for."""
WHILE_IMPORTING: list[str] = []
"""Those of them that were asked for before the first test."""


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    if not _is_here(host):
        OUTSIDE.append(str(host))


def _is_here(host: Any) -> bool:
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host if isinstance(host, str) else host.decode()).is_loopback
    except ValueError:
        return False


sys.addaudithook(_watch)


def pytest_collection_finish() -> None:
    """The clients' modules are imported by now."""
    WHILE_IMPORTING.extend(OUTSIDE)


@pytest.fixture(autouse=True)
def _nobody_else_is_called() -> Iterator[None]:
    before = len(OUTSIDE)
    yield
    assert OUTSIDE[before:] == []


@pytest.fixture(scope="session")
def pod(real_stack: Stack) -> Iterator[Pod]:
    """Takes KEY only. Not among the stack's pods, which other tests expect to be open."""
    pod = real_stack.add_pod({"HEADRACE_API_KEY": KEY})
    real_stack.pods.remove(pod)
    yield pod
    pod.kill()
