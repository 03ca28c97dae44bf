"""The tiny model, loaded once for all engine tests: a model holds no state between calls."""

from __future__ import annotations

from typing import Any

import pytest

from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from tests.support.llama_oracle import hf_from_directory
from tests.support.tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny(tiny_directory: Any) -> LoadedModel:
    return load(str(tiny_directory), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def reference(tiny_directory: Any) -> Any:
    """transformers' model over the same weights."""
    return hf_from_directory(tiny_directory)
