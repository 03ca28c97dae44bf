"""The OpenAPI document is whole: every route and reference, refusals in one shape, the key where it is asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from api_service.app import create_app
from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import Body, parse
from api_service.schemas.completion import CompletionRequest
from api_service.schemas.embedding import EmbeddingRequest
from api_service.settings import Settings
from shared.errors import ERRORS_BY_CODE
from tests.unit.api_service.test_surface import NOWHERE, make_app, paths_of

PUBLIC = {"/health", "/ready", "/metrics"}


def document(**settings: Any) -> dict[str, Any]:
    return create_app(Settings(redis_url=NOWHERE, **settings)).openapi()


def operations(whole: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, op) for path, methods in whole["paths"].items() for method, op in methods.items()]


def test_every_route_is_in_it_and_every_reference_leads_somewhere() -> None:
    whole = document()
    routes = {path.replace(":path}", "}") for path in paths_of(make_app())} - {"/openapi.json"}
    assert set(whole["paths"]) == routes
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(whole)))
    assert named <= set(whole["components"]["schemas"])
    assert "HTTPValidationError" not in whole["components"]["schemas"]


def test_every_refusal_has_openais_body_and_every_answer_a_request_id() -> None:
    for path, method, operation in operations(document()):
        assert operation["responses"].keys() >= {"200", "413", "500"}, path
        assert "422" not in operation["responses"]
        assert ("415" in operation["responses"]) == (method == "post")
        for status, response in operation["responses"].items():
            assert "x-request-id" in response["headers"]
            if int(status) >= 400 and path != "/ready":
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)


def test_no_error_of_ours_is_missing() -> None:
    whole = document(api_key="sk-1")
    types = whole["components"]["schemas"]["ErrorDetails"]["properties"]["type"]["enum"]
    statuses = {int(status) for _, _, operation in operations(whole) for status in operation["responses"]}
    for error in ERRORS_BY_CODE.values():
        assert error.status in statuses, error
        assert error.type in types, error


def test_the_key_is_asked_for_where_one_is_set_but_not_by_the_probes() -> None:
    assert all("security" not in operation for _, _, operation in operations(document()))
    for path, _, operation in operations(document(api_key="sk-1")):
        assert ("security" in operation) == ("401" in operation["responses"]) == (path not in PUBLIC)


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest, EmbeddingRequest])
def test_every_field_of_a_body_is_documented_also_those_that_are_not_honoured(model: type[Body]) -> None:
    properties = document()["components"]["schemas"][model.__name__]["properties"]
    assert set(properties) == model.model_fields.keys() | model.UNSUPPORTED.keys()
    for name in model.UNSUPPORTED:
        assert properties[name]["enum"][0] is None


@pytest.mark.parametrize(("value", "whole"), [(16.0, 16), (1e2, 100), (3, 3)])
def test_a_whole_number_is_an_integer_however_json_spells_it(value: float, whole: int) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": value, "seed": value}
    parsed = parse(ChatCompletionRequest, body)
    assert (parsed.max_tokens, parsed.seed) == (whole, whole)
    assert type(parsed.max_tokens) is int
