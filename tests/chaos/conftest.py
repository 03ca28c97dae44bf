"""What all chaos tests share: one tiny model, and its undisturbed answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chaos_load import MODEL, Oracle
from tests.support.tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("chaos") / MODEL, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)
