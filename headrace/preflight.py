"""What would end a worker as soon as it has loaded its libraries, found before anything starts.

In: the model, the flags that were set, the environment. Out: what is wrong, in words. Imports no torch: whatever needs
it to be known, the worker finds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from kernels.cpu.isa import candidate_levels, native_wanted
from shared.model_files import NoModelError, find_files

__all__ = ["worker_trouble"]

_ACCELERATED = re.compile(r"^(cuda|hip)\b.*= *'", re.MULTILINE)
_VERSION = re.compile(r"^__version__ *= *'(.*)'", re.MULTILINE)


def worker_trouble(model: str, settings: Mapping[str, str]) -> str | None:
    """Why no worker can run `model` with these settings; None where nothing is known to be wrong."""
    simulated = "HEADRACE_SIMULATE" in settings
    try:
        if model or not simulated:
            find_files(model)
        if simulated:
            return None
        if settings.get("HEADRACE_DEVICE") == "cuda":
            return _cuda_trouble()
        if native_wanted():
            candidate_levels()
    except (NoModelError, ValueError) as error:
        return str(error)
    return None


def _cuda_trouble() -> str | None:
    """torch says in a small file what it was built for."""
    spec = find_spec("torch")
    folders = (spec.submodule_search_locations or []) if spec else []
    texts = [file.read_text() for folder in folders if (file := Path(folder) / "version.py").is_file()]
    if not texts or _ACCELERATED.search(texts[0]):
        return None
    version = _VERSION.search(texts[0])
    return (
        f"--device cuda needs a torch that was built for it; the installed one ({version[1] if version else 'torch'}) "
        "runs on CPUs only. Install another, or leave --device away"
    )
