"""Quantised weights through the whole stack, on the real model: what is asked for is served, said, and makes sense."""

from __future__ import annotations

import httpx
import pytest

from kernels.cpu.library import load
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(300),
    pytest.mark.skipif(isinstance(load(), str), reason="no compiler for the native kernels"),
]


@pytest.mark.parametrize(("quantization", "kept"), [("gguf", "q4_1, q8_0"), ("int8", "int8")])
def test_packed_weights_answer_sensibly(redis_url: str, quantization: str, kept: str) -> None:
    env = {"HEADRACE_QUANTIZATION": quantization, "HEADRACE_MAX_MODEL_LEN": "512"}
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "What is 2+2?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    with Stack(redis_url, worker_env=env) as stack:
        answer = httpx.post(f"{stack.pods[0].base_url}/chat/completions", json=body, timeout=120, trust_env=False)
        log = stack.workers[0].log()
    assert "4" in answer.raise_for_status().json()["choices"][0]["message"]["content"]
    assert kept in log
