"""The tiny model, loaded once for all worker tests."""

from __future__ import annotations

import pytest

from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from tests.support.tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(make_tiny_llama(tmp_path_factory.mktemp("tiny"))), dtype="float32", device="cpu")
