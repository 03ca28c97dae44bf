"""Compiles kernels/cpu/src into a shared object, once per source, compiler and CPU level.

In: a level. Out: the path of a finished library in the user's cache. Safe with many processes starting at once: one
compiles, the others wait for it. `python -m kernels.cpu.build` fills the cache ahead of time, for images.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kernels.cpu.isa import Level, candidate_levels

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
    compiler = _compiler()
    directory = cache_directory()
    target = directory / f"{level.name}-{_fingerprint(compiler, level)}.so"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Looked for under the lock only when missing: a warm start takes no lock, and works on a read-only cache.
        if not _is_whole(target):
            with _locked(directory / "lock"):
                if not _is_whole(target):
                    _compile(compiler, level, target)
    except OSError as error:
        raise BuildError(f"the kernel cache {directory} is not usable: {error}") from error
    return target


def must_compile() -> bool:
    """Whether the next start will compile: a compiler is there and its library is not. Raises ValueError for a bad
    HEADRACE_CPU_ISA."""
    level = candidate_levels()[0]
    try:
        return not _is_whole(cache_directory() / f"{level.name}-{_fingerprint(_compiler(), level)}.so")
    except BuildError:
        return False


def _is_whole(library: Path) -> bool:
    """Whether it is there to its end: opening one that a full disk or a power cut has truncated would end the
    process."""
    try:
        with library.open("rb") as file:
            file.seek(-len(_END), os.SEEK_END)
            return file.read() == _END
    except OSError:
        return False


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(names)})")


def _fingerprint(compiler: str, level: Level) -> str:
    """Changes with anything the library's bytes depend on."""
    version = _run([compiler, "--version"], "the compiler does not run")
    digest = hashlib.sha256()
    for part in (version, " ".join((*_FLAGS, *level.flags())), _openmp_library()):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _openmp_library() -> str:
    """The OpenMP runtime torch brought along, so that both use one thread pool; the compiler's own where torch has
    none."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(bundled[0]) if bundled else "-lgomp"


def _compile(compiler: str, level: Level, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [work / f"{source.stem}.o" for source in sources]
        compiles = [
            [compiler, *_FLAGS, *level.flags(), "-c", str(source), "-o", str(out)]
            for source, out in zip(sources, objects, strict=True)
        ]
        _run_all(compiles)
        library = work / "library.so"
        # Without -fopenmp: it would link the compiler's runtime next to torch's.
        link = [compiler, "-shared", *map(str, objects), _openmp_library(), "-lpthread", "-o", str(library)]
        _run(link, "linking the kernels failed")
        with library.open("ab") as file:
            file.write(_END)
            file.flush()
            os.fsync(file.fileno())
        library.replace(target)


def _run_all(commands: list[list[str]]) -> None:
    """Runs compilers side by side: there are few files, and the slowest takes most of the time."""
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    failure = ""
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


def _run(command: list[str], problem: str) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{problem}: {error}") from error
    if done.returncode:
        raise BuildError(f"{problem}: {_gist(done.stdout + done.stderr)}")
    return done.stdout


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
        print(build(candidate_levels()[0]))
    except (BuildError, ValueError) as error:
        sys.exit(f"headrace kernels: {error}")
