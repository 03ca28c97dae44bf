"""schemathesis over our own OpenAPI document: whatever it sends, no 5xx, no status and no shape that is not documented.

Bounded and derandomised: the same requests in every run. The tiny model answers, few tokens each time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi import checks

from tests.support.redis_server import RedisServer
from tests.support.stack import Stack
from tests.support.tiny_model import make_tiny_llama

LIMITS = {"max_tokens": 6, "max_completion_tokens": 6, "min_tokens": 6, "n": 3, "best_of": 3}
OPTIONAL = 4
"""Fields of a plausible body besides the required ones: with all of them at once, some always contradict each other."""
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
]
DOOR = ["negative_data_rejection", "missing_required_header", "unsupported_method"]
MOST = {"/v1/chat/completions": 80, "/v1/completions": 80, "/v1/embeddings": 40, "/tokenize": 30, "/detokenize": 15}
"""Requests of the fuzzing, by path."""
ANSWERED = {"/v1/chat/completions": 30, "/v1/completions": 30, "/v1/embeddings": 10, "/tokenize": 10, "/detokenize": 5}
"""How many of them have to come to an answer, or they would try nothing but the door."""
STREAMED = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    with RedisServer() as redis, Stack(redis.url, model) as stack:
        yield stack.pods[0].url


@pytest.fixture(scope="module")
def document(url: str) -> dict[str, Any]:
    whole: dict[str, Any] = httpx.get(f"{url}/openapi.json").json()
    return whole


def limited(document: dict[str, Any]) -> dict[str, Any]:
    """The document with requests kept short and to the point; what is answered stays as it is."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    for name, schema in copy["components"]["schemas"].items():
        if not name.endswith("Request"):
            continue
        properties = schema["properties"]
        nullable = "anyOf" in properties["model"]
        properties["model"] = {"enum": ["tiny", "other", *([None, ""] if nullable else [])]}
        for field, most in LIMITS.items():
            if "anyOf" in properties.get(field, {}):
                properties[field]["anyOf"][0]["maximum"] = most
    return copy


def test_the_whole_document_is_tried_value_by_value(url: str, document: dict[str, Any], tmp_path: Path) -> None:
    """schemathesis' own deterministic phase: bounds of every field, wrong types, what is missing or undocumented."""
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(limited(document)))
    program = [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", url, "--phases", "coverage"]
    chosen = ["--generation-deterministic", "--checks", ",".join([*CHECKS, *DOOR]), "--no-color"]
    run = subprocess.run([*program, *chosen], check=False, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-8000:]
    generated = int(run.stdout.split(" generated, ")[0].rpartition(" ")[2])
    assert generated > 1000, run.stdout[-2000:]


@pytest.mark.parametrize("path", MOST)
def test_plausible_requests_get_documented_answers(url: str, document: dict[str, Any], path: str) -> None:
    api = schemathesis.openapi.from_dict(limited(document))
    found = Counter[int | str]()

    @settings(
        max_examples=MOST[path],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(api[path]["POST"].as_strategy(), st.randoms(use_true_random=False))
    def run(case: schemathesis.Case, rng: Any) -> None:
        case.body = plausible(case.body, rng)
        case.headers = {}
        response = case.call(base_url=url)
        found[response.status_code] += 1
        found["stream"] += response.headers["content-type"][0].startswith("text/event-stream")
        case.validate_response(response, checks=[_check(name) for name in CHECKS])

    run()
    assert found[200] >= ANSWERED[path], found
    assert found["stream"] >= 3 or path not in STREAMED, found
    assert found.keys() <= {"stream", 200, 400, 408}, found


def plausible(body: Any, rng: Any) -> Any:
    """The body with few optional fields, of the served model, with token ids that exist."""
    required = [key for key in body if key in ("messages", "prompt", "input", "tokens")]
    others = [key for key in body if key not in required]
    kept = [*required, *rng.sample(others, min(OPTIONAL, len(others)))]
    chosen = {key: known_ids(body[key]) if key in _WITH_IDS else body[key] for key in kept}
    chosen = {"max_tokens": 6, **chosen, "model": "tiny"}
    if "messages" in chosen:
        chosen["messages"] = [plausible_message(message) for message in chosen["messages"]]
    streams = "prompt" in body or "messages" in body
    if streams and "prompt_logprobs" not in chosen and (rng.random() < 0.4 or "stream_options" in chosen):
        chosen["stream"] = True
    return chosen


def plausible_message(message: Any) -> Any:
    """Calls by assistants only, and text everywhere else."""
    calls = () if message["role"] == "assistant" else ("tool_calls", "function_call")
    kept = {key: value for key, value in message.items() if key not in calls}
    return kept | ({"content": "x"} if message.get("content") is None else {})


_WITH_IDS = {"prompt", "input", "tokens", "stop_token_ids", "allowed_token_ids", "logit_bias"}


def known_ids(value: Any) -> Any:
    """The same with every integer made a token of the tiny model, and nothing empty."""
    if isinstance(value, dict):
        return {str(int(key) % 320): number for key, number in value.items()}
    if isinstance(value, list):
        return [known_ids(item) for item in value] or [5]
    return "x" if value == "" else int(value) % 320 if type(value) in (int, float) else value


def _check(name: str) -> Any:
    return getattr(checks, name, None) or getattr(schemathesis.checks, name)
