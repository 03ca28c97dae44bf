"""One real stack for the end-to-end tests: SmolLM2 in float32, two pods and two workers on a Redis of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.llama_oracle import default_gguf, hf_from_gguf
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack

REAL_MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def real_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def real_stack(real_redis: RedisServer) -> Iterator[Stack]:
    """float32, so that an answer does not depend on its batch."""
    settings = {"HEADRACE_DTYPE": "float32", "HEADRACE_KV_CACHE_MEMORY": "384M", "HEADRACE_MAX_NUM_SEQS": "16"}
    with Stack(real_redis.url, pods=2, workers=2, worker_env=settings) as stack:
        yield stack


@pytest.fixture(scope="session")
def reference() -> Any:
    """transformers' own model of the same weights in float32. Not to be changed: many tests ask it."""
    return hf_from_gguf(default_gguf())
