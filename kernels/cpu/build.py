"""Compiles kernels/cpu/src into a shared object, once per source and CPU level.

In: a level. Out: the path of a finished library in the user's cache. Safe with many processes starting at once: one
compiles, the others wait for it. A library that is there needs no compiler: `python -m kernels.cpu.build` fills the
cache ahead of time, for every CPU, so that images need none.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kernels.cpu.isa import Level, buildable_levels, candidate_levels

__all__ = ["BuildError", "build", "cache_directory", "must_compile"]

_SOURCES = Path(__file__).parent / "src"
_FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    # Vectors cross no library boundary, so the note on their calling convention is moot.
    "-Wno-psabi",
)
_END = b"whole headrace kernels"
"""Behind what a loader reads of a library."""
_COMPILE_TIMEOUT_S = 300
_ERROR_LINES = 3


class BuildError(Exception):
    """The kernels cannot be built here; the text says why, for one log line."""


def cache_directory() -> Path:
    """Where libraries are kept: HEADRACE_KERNEL_CACHE, else headrace/kernels in the user's cache."""
    override = os.environ.get("HEADRACE_KERNEL_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace" / "kernels"


def build(level: Level) -> Path:
    """The library for `level`, compiled now if it is not in the cache. Raises BuildError."""
    target = _target(level)
    # Looked for under the lock only when missing: a warm start takes no lock, and works on a read-only cache.
    if _is_whole(target):
        return target
    compiler = _compiler()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / "lock"):
            if not _is_whole(target):
                _compile(compiler, level, target)
    except OSError as error:
        reason = error.strerror or error
        raise BuildError(f"the kernel cache {target.parent} (HEADRACE_KERNEL_CACHE) is not usable: {reason}") from error
    return target


def must_compile() -> bool:
    """Whether the next start will compile: its library is not there, a compiler and a place for it are. Raises
    ValueError for a bad HEADRACE_CPU_ISA."""
    target = _target(candidate_levels()[0])
    if _is_whole(target):
        return False
    try:
        _compiler()
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            return True
    except (BuildError, OSError):
        return False


def _target(level: Level) -> Path:
    return cache_directory() / f"{level.name}-{_fingerprint(level)}.so"


def _is_whole(library: Path) -> bool:
    """Whether it is there to its end: opening one that a full disk or a power cut has truncated would end the
    process."""
    try:
        with library.open("rb") as file:
            file.seek(-len(_END), os.SEEK_END)
            return file.read() == _END
    except OSError:
        return False


def _compiler() -> list[str]:
    """The command that compiles: CXX, which may have arguments ("ccache g++"), else what is installed."""
    chosen = _chosen_compiler()
    try:
        commands = [shlex.split(chosen)] if chosen else [["g++"], ["c++"]]
    except ValueError as error:
        raise BuildError(f"CXX is {chosen!r}, which is no command: {error}") from error
    for command in commands:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    if chosen:
        raise BuildError(f"there is no {commands[0][0]}, which CXX names as the C++ compiler")
    raise BuildError("no C++ compiler is installed; install g++ (apt-get install g++) and start again")


def _chosen_compiler() -> str:
    return os.environ.get("CXX", "").strip()


def _fingerprint(level: Level) -> str:
    """Changes with anything that decides what the library's functions are and whether it can be loaded here. Which
    compiler made it does not, unless CXX asks for one: those of an image are used where there is none."""
    digest = hashlib.sha256()
    machine = (platform.machine(), *platform.libc_ver(), Path(_openmp_library()).name)
    for part in (*machine, *_FLAGS, *level.flags(), _chosen_compiler()):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _openmp_library() -> str:
    """The OpenMP runtime torch brought along, so that both use one thread pool; the compiler's own where torch has
    none."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(bundled[0]) if bundled else "-lgomp"


def _compile(compiler: list[str], level: Level, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [work / f"{source.stem}.o" for source in sources]
        compiles = [
            [*compiler, *_FLAGS, *level.flags(), "-c", str(source), "-o", str(out)]
            for source, out in zip(sources, objects, strict=True)
        ]
        _run_all(compiles)
        library = work / "library.so"
        # Without -fopenmp: it would link the compiler's runtime next to torch's.
        _run_all([[*compiler, "-shared", *map(str, objects), _openmp_library(), "-lpthread", "-o", str(library)]])
        with library.open("ab") as file:
            file.write(_END)
            file.flush()
            os.fsync(file.fileno())
        library.replace(target)


def _run_all(commands: list[list[str]]) -> None:
    """Runs compilers side by side: there are few files, and the slowest takes most of the time."""
    running: list[subprocess.Popen[str]] = []
    failure = ""
    try:
        running.extend(map(_started, commands))
    except OSError as error:
        failure = f"{commands[0][0]} does not run: {error.strerror}"
    for process in running:
        try:
            output, _ = process.communicate(timeout=_COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output = f"gave up after {_COMPILE_TIMEOUT_S} s\n{output}"
        if process.returncode and not failure:
            failure = _gist(output)
    if failure:
        raise BuildError(f"compiling the kernels failed: {failure}")


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _gist(output: str) -> str:
    """The first lines that tell an error from the compiler's context."""
    lines = [line.strip() for line in output.splitlines() if "error" in line.lower()]
    return " | ".join(lines[:_ERROR_LINES]) or output.strip()[-200:] or "no output"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, also when the process dies


if __name__ == "__main__":
    try:
        for one in buildable_levels():
            print(build(one), flush=True)
    except BuildError as error:
        sys.exit(f"headrace kernels: {error}")
