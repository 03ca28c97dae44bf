"""What a worker's engine is like before its first request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine_worker.engine import Engine
from engine_worker.errors import LoadError
from engine_worker.loading import load_engine, make_engine
from engine_worker.models.base import LoadedModel
from engine_worker.settings import WorkerSettings
from kernels.cpu.library import load as load_library
from tests.support.requests import make_request


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor a library that was compiled before."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HEADRACE_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def settings(model: Path, **more: object) -> WorkerSettings:
    return WorkerSettings(
        redis_url="redis://127.0.0.1:1", model=str(model), device="cpu", kv_cache_memory=1 << 22, **more
    )


@pytest.mark.usefixtures("no_compiler")
def test_a_worker_without_a_compiler_warns_once_with_what_to_do(tiny_directory: Path) -> None:
    with capture_logs() as lines:
        load_engine(settings(tiny_directory, kv_cache_dtype="int8"))
    [warning] = [line for line in lines if line["log_level"] == "warning"]
    assert "several times slower" in warning["event"]
    assert "install g++" in warning["reason"]
    assert not [line for line in lines if "compiling" in line["event"]]


@pytest.mark.usefixtures("no_compiler")
def test_a_quantization_that_needs_the_compiled_kernels_is_refused_without_a_compiler(tiny_directory: Path) -> None:
    with pytest.raises(LoadError, match=r"--quantization int8 needs .*install g\+\+"):
        load_engine(settings(tiny_directory, quantization="int8"))


def test_batch_work_that_comes_first_is_not_kept_short_because_of_the_warm_up(tiny: LoadedModel) -> None:
    settings = WorkerSettings(redis_url="redis://127.0.0.1:1", kv_cache_memory=1 << 22, max_num_seqs=8)
    engine = make_engine(settings, loaded=tiny).engine
    assert isinstance(engine, Engine)
    for number in range(8):
        engine.add(make_request([number] * 40, 20, klass="batch"))
    sizes = []
    while engine.has_work:
        before = engine.stats().counters["computed_tokens"]
        engine.step()
        size = engine.stats().counters["computed_tokens"] - before
        sizes.append(size)
        engine.took(0.005 + 0.001 * size)
    # Steps of 25 ms would hold 20 tokens: prompts of 320 would take as many steps as the answers.
    assert max(sizes) >= 80
    assert len(sizes) <= 30
