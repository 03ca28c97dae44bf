"""The first pod of the real stack, and a check that it still answers after whatever a test did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.api_cases import TEXT, force, whole
from tests.support.stack import Stack


@pytest.fixture
def url(real_stack: Stack) -> Iterator[str]:
    """T-CANARY: after each test a forced answer is right."""
    url = real_stack.pods[0].url
    yield url
    assert whole(url, TEXT, text="x", max_tokens=1, **force(905))["choices"][0]["text"] == " world"
