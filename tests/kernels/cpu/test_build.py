"""The build driver: one compile per source and flags, harmless when many start at once, honest where it cannot."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu import build as driver
from kernels.cpu import isa
from kernels.cpu.build import BuildError, build, cache_directory
from kernels.cpu.isa import Level, available_levels, candidate_levels
from kernels.cpu.library import Library, load
from kernels.cpu.native import NativeOps
from kernels.cpu.onednn import OneDnnOps
from kernels.ops import select_backend

PORTABLE = Level("portable", ())


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A one-function library in place of the kernels, and an empty cache."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" __attribute__((visibility("default"))) int one() { return 1; }\n')
    monkeypatch.setattr(driver, "_SOURCES", sources)
    monkeypatch.setenv("HEADRACE_KERNEL_CACHE", str(tmp_path / "cache"))
    return sources


@pytest.fixture
def fresh_load() -> object:
    """Forgets which library this process loaded, before and after."""
    load.cache_clear()
    yield None
    load.cache_clear()


def test_a_second_build_takes_the_first_ones_library(small_source: Path) -> None:
    first = build(PORTABLE)
    written = first.stat().st_mtime_ns
    assert build(PORTABLE) == first
    assert first.stat().st_mtime_ns == written
    assert sorted(path.name for path in first.parent.iterdir()) == ["lock", first.name]


@pytest.mark.parametrize("kept", [0, 3, 5000, -1])
def test_a_truncated_library_is_compiled_again(small_source: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """Opening it would end the process with a bus error."""
    monkeypatch.setenv("HEADRACE_CPU_ISA", "portable")
    whole = build(candidate_levels()[0])
    assert not driver.must_compile()
    whole.write_bytes(whole.read_bytes()[:kept])
    assert driver.must_compile()
    assert build(candidate_levels()[0]) == whole
    assert ctypes.CDLL(str(whole)).one() == 1


def test_a_changed_source_or_flag_is_another_library(small_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(PORTABLE)
    (small_source / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    second = build(PORTABLE)
    monkeypatch.setattr(driver, "_FLAGS", (*driver._FLAGS, "-DX=1"))
    assert len({first, second, build(PORTABLE)}) == 3


def test_processes_starting_at_once_end_with_one_whole_library(small_source: Path) -> None:
    code = (
        "import pathlib, sys; from kernels.cpu import build; from kernels.cpu.isa import Level;"
        "build._SOURCES = pathlib.Path(sys.argv[1]); print(build.build(Level('portable', ())))"
    )
    command = [sys.executable, "-c", code, str(small_source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=100)[0].strip() for process in processes}
    assert paths == {str(build(PORTABLE))}
    assert len(list(cache_directory().glob("*.so"))) == 1


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("small_source", "no_compiler")
def test_without_a_compiler_the_reason_and_the_remedy_are_told() -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler is installed.*g\+\+"):
        build(PORTABLE)
    assert not driver.must_compile()


def test_what_was_built_elsewhere_is_used_without_a_compiler(
    small_source: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's image has the libraries and no compiler."""
    monkeypatch.delenv("CXX", raising=False)
    built = build(PORTABLE)
    request.getfixturevalue("no_compiler")
    assert build(PORTABLE) == built


def test_what_was_built_from_other_sources_is_not_used(
    small_source: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    build(PORTABLE)
    (small_source / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    request.getfixturevalue("no_compiler")
    with pytest.raises(BuildError, match="no C"):
        build(PORTABLE)


def test_a_chosen_compiler_may_have_arguments(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with CXX="ccache g++"."""
    log = tmp_path / "log"
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"{wrapper} g++ -DTHROUGH_CXX=1")
    assert ctypes.CDLL(str(build(PORTABLE))).one() == 1
    assert all(line.startswith("g++ -DTHROUGH_CXX=1 ") for line in log.read_text().splitlines())


@pytest.mark.usefixtures("small_source")
@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ("no-such-compiler -O1", "there is no no-such-compiler, which CXX names"),
        ("'g++", "which is no command"),
        ("/dev/null", "there is no /dev/null"),
    ],
)
def test_a_chosen_compiler_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, chosen: str, told: str
) -> None:
    monkeypatch.setenv("CXX", chosen)
    with pytest.raises(BuildError, match=told):
        build(PORTABLE)


def test_a_compiler_that_does_not_run_is_named(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\0\0\0\0")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match=r"compiling the kernels failed: .*broken does not run"):
        build(PORTABLE)


def test_a_failing_compile_shows_the_compilers_error(small_source: Path) -> None:
    (small_source / "one.cpp").write_text("int broken( {\n")
    with pytest.raises(BuildError, match=r"compiling the kernels failed: .*error"):
        build(PORTABLE)
    assert not list(cache_directory().glob("*.so"))


def test_an_unusable_cache_is_named(small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("HEADRACE_KERNEL_CACHE", str(blocker / "cache"))
    with pytest.raises(BuildError, match=r"kernel cache .*HEADRACE_KERNEL_CACHE.* is not usable"):
        build(PORTABLE)
    assert not driver.must_compile(), "a compile is announced that cannot begin"


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "headrace" / "kernels"


def test_a_level_can_be_forced_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CPU_ISA", "portable")
    assert [level.name for level in candidate_levels()] == ["portable"]
    monkeypatch.setenv("HEADRACE_CPU_ISA", "mmx")
    with pytest.raises(ValueError, match=r"HEADRACE_CPU_ISA is 'mmx'; this CPU runs .*portable"):
        candidate_levels()
    monkeypatch.setenv("HEADRACE_CPU_ISA", "")
    assert candidate_levels() == available_levels()


@pytest.mark.usefixtures("fresh_load")
def test_backend_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CPU_BACKEND", "torch")
    assert not isinstance(select_backend("cpu"), NativeOps)
    monkeypatch.delenv("HEADRACE_CPU_BACKEND")
    monkeypatch.setenv("HEADRACE_CPU_ISA", "portable")
    assert select_backend("cpu").name == "native-portable"
    monkeypatch.setenv("HEADRACE_CPU_BACKEND", "fast")
    with pytest.raises(ValueError, match="HEADRACE_CPU_BACKEND is 'fast'; allowed: native, torch"):
        select_backend("cpu")


def test_every_cpu_runs_the_best_of_what_an_image_is_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine compiles for itself, and looks for, is one of the levels that are built for all."""
    common = {"avx2", "fma", "f16c"}
    skylake = common | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    ice_lake = skylake | {"avx512_vnni", "avx512vbmi"}
    zen_4 = ice_lake | {"avx512_bf16"}
    for features, best in ((set(), ""), (common, "f16c"), (skylake, "dq"), (ice_lake, "vnni"), (zen_4, "bf16")):
        monkeypatch.setattr(isa, "_cpu_features", lambda features=features: frozenset(features))
        levels = available_levels()
        assert set(levels) <= set(isa.LEVELS)
        assert len({level.name for level in levels}) == len(levels)
        assert best in " ".join(levels[0].required)
        assert features.issuperset(levels[0].required)


@pytest.mark.usefixtures("fresh_load", "small_source", "no_compiler")
def test_torch_serves_and_says_why_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CPU_BACKEND", "native")
    ops = select_backend("cpu")
    assert isinstance(ops, OneDnnOps)
    assert "no C++ compiler is installed" in ops.note


def test_threads_default_to_torchs() -> None:
    assert NativeOps(Library(PORTABLE)).threads == torch.get_num_threads()
