"""The app without Redis: keys on every route, error bodies everywhere, ids, body limits, probes, CORS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Route

from api_service.app import create_app
from api_service.settings import Settings

KEY = "sk-right"
PUBLIC = {"/health", "/ready", "/metrics"}
NOWHERE = "redis://127.0.0.1:1/0"


def make_app(**settings: Any) -> FastAPI:
    return create_app(Settings(redis_url=NOWHERE, **settings))


@asynccontextmanager
async def client_of(app: FastAPI, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """Without lifespan: no background task runs, and Redis is never reached."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod", headers=headers) as client:
        yield client
    await app.state.services.close()


def paths_of(app: FastAPI) -> list[str]:
    return sorted({route.path for route in app.routes if isinstance(route, Route)})


def is_error(response: httpx.Response) -> bool:
    body = response.json()
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


async def test_err_06_every_route_asks_for_the_key_but_the_probes() -> None:
    app = make_app(api_key="sk-other,sk-right")
    assert len(paths_of(app)) > 8
    async with client_of(app) as client:
        for path in paths_of(app):
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
                for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": f"Basic {KEY}"}):
                    response = await client.request(method, path, headers=headers)
                    if path in PUBLIC and method in ("GET", "HEAD"):
                        assert response.status_code != 401
                        continue
                    assert response.status_code == 401, (method, path)
                    if method != "HEAD":
                        assert is_error(response)
                        assert response.json()["error"]["code"] == "invalid_api_key"
                    assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/version", headers={"Authorization": f"bearer {KEY}"})).status_code == 200


async def test_the_chat_template_and_special_tokens_are_told_only_to_holders_of_the_key() -> None:
    async with client_of(make_app(api_key=KEY)) as client:
        for path in ("/tokenizer_info", "/tokenizer_info?model=m"):
            assert (await client.get(path)).json()["error"]["code"] == "invalid_api_key"
            assert (await client.get(path, headers={"Authorization": f"Bearer {KEY}"})).status_code not in (401, 404)


@pytest.mark.parametrize("root", ["", "/llm", "/v", "/v1", "/health"])
async def test_err_08_no_spelling_of_a_path_gets_around_the_key(root: str) -> None:
    app = make_app(api_key=KEY, root_path=root)
    spellings = ["/v1/models", "//v1/models", "/V1/models", "/v1/models/", "/v1/../v1/models", "/health/../v1/models"]
    spellings += ["/llm/v1/models", "/v2/v1/models", "/health/v1/models", "/metrics/../version", "/invocations", "/"]
    async with client_of(app) as client:
        for path in spellings:
            assert (await client.get("http://pod" + path)).status_code == 401, path
        with_key = {"Authorization": f"Bearer {KEY}"}
        assert (await client.get("/version", headers=with_key)).status_code == 200
        assert (await client.get(f"{root}/version", headers=with_key)).status_code == 200
    if root:
        assert app.openapi()["servers"][0]["url"] == root


async def test_err_02_errors_of_the_framework_have_the_same_body() -> None:
    async with client_of(make_app()) as client:
        for method, path, status in (
            ("GET", "/nope", 404),
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/health", 405),
        ):
            response = await client.request(method, path)
            assert response.status_code == status
            assert is_error(response)
        assert "allow" in (await client.get("/v1/chat/completions")).headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_bad_bodies_are_refused_before_redis_is_asked(path: str) -> None:
    async with client_of(make_app()) as client:
        json = {"content-type": "application/json"}
        for content in (b"", b"{", b"[]", b"\xff", b'{"model": NaN}'):
            response = await client.post(path, content=content, headers=json)
            assert response.status_code == 400
            assert is_error(response)
            assert len(response.content) < 16_384
        form = await client.post(path, content=b"{}", headers={"content-type": "application/x-www-form-urlencoded"})
        assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
        away = await client.post(
            path, json={"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
        )
        assert (away.status_code, away.json()["error"]["code"]) == (503, "redis_unavailable")
        assert int(away.headers["retry-after"]) >= 1


async def test_x_request_id_goes_in_and_out() -> None:
    async with client_of(make_app(api_key=KEY)) as client:
        own = await client.get("/health", headers={"x-request-id": "abc-1"})
        assert own.headers["x-request-id"] == "abc-1"
        strange = await client.get("/health", headers={"x-request-id": "a b" * 100})
        assert strange.headers["x-request-id"].startswith("req_")
        assert "x-request-id" in (await client.get("/nope")).headers


async def test_lim_08_body_limit_with_and_without_a_length() -> None:
    async with client_of(make_app(max_body_bytes=1024)) as client:
        announced = await client.post("/v1/completions", content=b"x" * 2000)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100
                await asyncio.sleep(0)

        chunked = await client.post("/v1/completions", content=chunks())
        for response in (announced, chunked):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_an_unforeseen_fault_is_a_500_with_our_body(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()

    async def broken(_: str) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(app.state.services.registry, "served", broken)
    async with client_of(app) as client:
        response = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert response.status_code == 500
        assert is_error(response)
        assert "secret" not in response.text
        assert "x-request-id" in response.headers
    assert app.state.services.admission.active == 0


async def test_cors_is_off_unless_set() -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with client_of(make_app(api_key=KEY)) as client:
        assert (await client.options("/v1/completions", headers=preflight)).status_code == 401
    async with client_of(make_app(api_key=KEY, cors_origins="https://a.example")) as client:
        allowed = await client.options("/v1/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = await client.post("/v1/completions", headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


async def test_ops_04_probes_without_redis() -> None:
    async with client_of(make_app()) as client:
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "redis cannot be reached")
        assert (await client.get("/ping")).status_code == 200
        assert "headrace_pod_requests 0.0" in (await client.get("/metrics")).text


def test_abt_03_no_middleware_that_hides_disconnects() -> None:
    for middleware in make_app(cors_origins="*").user_middleware:
        assert isinstance(middleware.cls, type)
        assert not issubclass(middleware.cls, BaseHTTPMiddleware)
