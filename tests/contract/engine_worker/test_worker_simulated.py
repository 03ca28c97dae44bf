"""A simulated worker as a program: what it needs, what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine_worker.worker import EXIT_UNUSABLE
from tests.support.gguf_model import make_tiny_gguf
from tests.support.stack import Stack

PROGRAM = """
import os, sys
os.environ["HEADRACE_SIMULATE"] = "tokens_per_s=5"
os.environ["HEADRACE_MODEL"] = sys.argv[1]
import engine_worker.program
from engine_worker.engines import load_engine
from engine_worker.settings import read_settings
warm = load_engine(read_settings())
heavy = ("torch", "transformers", "kernels")
print(warm.card.name, sorted(name for name in sys.modules if name.split(".")[0] in heavy))
"""


@pytest.mark.parametrize("kind", ["built in", "gguf"])
def test_it_imports_no_torch(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("gguf") / "lent.gguf"
    if kind == "gguf":
        make_tiny_gguf(model)
    command = [sys.executable, "-c", PROGRAM, str(model) if kind == "gguf" else ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == f"{'lent' if kind == 'gguf' else 'simulated'} []"


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"HEADRACE_SIMULATE": "fast"}, "HEADRACE_SIMULATE='fast': 'fast' in it is none of tokens_per_s=N"),
        ({"HEADRACE_SIMULATE": "tokens_per_s=0"}, "tokens_per_s=0 in it must be a number from 0.1 to 1000000"),
        ({"HEADRACE_SIMULATE": "tokens_per_s=1", "HEADRACE_MODEL": "/nowhere"}, "There is no file or directory"),
    ],
)
def test_what_it_cannot_use_ends_the_start_with_the_reason(redis_url: str, env: dict[str, str], reason: str) -> None:
    with Stack(redis_url, env.get("HEADRACE_MODEL", ""), pods=0, worker_env=env, wait=False) as stack:
        assert stack.workers[0].wait() == EXIT_UNUSABLE
        assert reason in stack.workers[0].log_path.read_text()
