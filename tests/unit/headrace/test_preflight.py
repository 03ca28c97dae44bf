"""What is refused before anything starts, though only a worker minds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import preflight
from headrace.preflight import worker_trouble

SIMULATED = {"HEADRACE_SIMULATE": "tokens_per_s=9"}


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_CPU_ISA", "HEADRACE_CPU_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "m.gguf"
    file.touch()
    return str(file)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("HEADRACE_CPU_ISA", "avx3", "HEADRACE_CPU_ISA is 'avx3'; this CPU runs .*portable"),
        ("HEADRACE_CPU_BACKEND", "fast", "HEADRACE_CPU_BACKEND is 'fast'; allowed: native, torch"),
    ],
)
def test_a_bad_variable_of_the_kernels_is_told_with_what_is_allowed(
    model: str, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, allowed: str
) -> None:
    assert worker_trouble(model, {}) is None
    monkeypatch.setenv(variable, value)
    assert re.search(allowed, worker_trouble(model, {}) or "")
    assert worker_trouble("", SIMULATED) is None, "a simulated engine has no kernels"


def test_a_model_that_is_not_there_is_told_and_a_hub_id_left_to_the_worker(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert missing in (worker_trouble(missing, {}) or "")
    assert missing in (worker_trouble(missing, SIMULATED) or ""), "its tokenizer is wanted"
    assert "no config.json" in (worker_trouble(str(tmp_path), {}) or "")
    assert worker_trouble("some/model", {}) is None


@pytest.mark.parametrize(
    ("built_for", "refused"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", False),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", False),
        ("cuda = '12.8'\n", False),
    ],
)
def test_cuda_is_refused_where_torch_was_not_built_for_it(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, built_for: str, refused: bool
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (package / "version.py").write_text(f"__version__ = '9.9+x'\n{built_for}")
    code = (
        "import headrace.preflight as p; import sys; print(p.worker_trouble(sys.argv[1], {'HEADRACE_DEVICE': 'cuda'}))"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(preflight.__file__).parents[1]}")
    run = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    assert ("--device cuda" in run.stdout and "9.9+x" in run.stdout) == refused
    assert run.stdout.startswith("None") != refused
