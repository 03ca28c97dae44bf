"""What a user may name as a model -> files on this machine.

A Hugging Face directory, a hub id (fetched into or found in the hub's own cache), a .gguf file, or "" for the default
model that comes as a Python package.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from engine_worker.errors import LoadError
from shared.model_files import ModelFiles, NoModelError, find_files

__all__ = ["resolve"]

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve(source: str) -> ModelFiles:
    """Finds (for a hub id: downloads) the files of `source`. Raises LoadError."""
    try:
        return find_files(source) or ModelFiles(_hub_directory(source), source)
    except NoModelError as error:
        raise LoadError(str(error)) from error


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
