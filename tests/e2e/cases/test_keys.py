"""Cases ERR-06 and ERR-08: a pod with keys, one in its environment and one in a file, beside the real stack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.api_cases import TEXT, body_of
from tests.support.stack import Stack

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(120)]
OPEN = {"/health", "/ready", "/metrics"}


@pytest.fixture(scope="module")
def guarded(real_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-file\n")
    env = {"HEADRACE_API_KEY": "sk-env", "HEADRACE_API_KEY_FILE": str(keys), "HEADRACE_CORS_ORIGINS": "https://a.test"}
    pod = real_stack.add_pod({**env, "HEADRACE_ROOT_PATH": "/llm"})
    yield pod.url
    pod.kill()
    real_stack.pods.remove(pod)


@pytest.mark.parametrize("key", ["sk-env", "sk-file"])
def test_err_06_every_key_is_accepted(guarded: str, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(guarded + TEXT, json=body_of(TEXT, max_tokens=1), headers=headers, timeout=60)
    assert answer.status_code == 200
    assert httpx.get(f"{guarded}/llm/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Basic sk-env"}])
def test_err_06_every_route_is_closed_without_one(guarded: str, headers: dict[str, str]) -> None:
    paths = httpx.get(f"{guarded}/openapi.json", headers={"Authorization": "Bearer sk-env"}).json()["paths"]
    assert len(paths) > 10
    for path, methods in paths.items():
        for method in methods:
            answer = httpx.request(method, guarded + path, headers=headers)
            if path in OPEN:
                assert answer.status_code != 401
            else:
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"


def test_err_08_no_spelling_gets_around_it(guarded: str) -> None:
    for path in (
        "/v1/models",
        "//v1/models",
        "/V1/models",
        "/v1/%6dodels",
        "/v1/models/",
        "/llm/v1/models",
        "/invocations",
    ):
        assert httpx.get(guarded + path).status_code == 401, path


def test_err_06_browsers_get_their_headers(guarded: str) -> None:
    origin = {"Origin": "https://a.test"}
    ask = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = httpx.options(guarded + TEXT, headers=ask)
    assert preflight.status_code in (200, 204)
    assert preflight.headers["access-control-allow-origin"] == "https://a.test"
    closed = httpx.post(guarded + TEXT, json={}, headers=origin)
    assert (closed.status_code, closed.headers["access-control-allow-origin"]) == (401, "https://a.test")
