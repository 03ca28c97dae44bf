"""docs/openai_api.md against the openai package's own types, and against what the server does."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from openai.types import Model, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from api_service.app import create_app
from api_service.prepare.chat import prepare_chat
from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import Body, parse
from api_service.schemas.completion import CompletionRequest
from api_service.schemas.embedding import EmbeddingRequest
from api_service.settings import Settings
from shared.errors import InvalidRequest
from tests.support.scripted_worker import token_ids
from tests.support.served import served
from tests.unit.api_service.test_surface import NOWHERE, client_of

DOCUMENT = (Path(__file__).parents[3] / "docs" / "openai_api.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*)\|$", re.MULTILINE)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
EMBEDDING: dict[str, Any] = {"model": "m", "input": "x"}
ENDPOINTS: dict[str, tuple[type[Body], dict[str, Any], str]] = {
    "Chat completions": (ChatCompletionRequest, CHAT, "/v1/chat/completions"),
    "Completions": (CompletionRequest, TEXT, "/v1/completions"),
    "Embeddings": (EmbeddingRequest, EMBEDDING, "/v1/embeddings"),
}
REFUSED_VALUES: dict[str, Any] = {"store": True, "verbosity": "low", "modalities": ["audio"]}
"""Where any other value than {"a": 1} is the one to try."""


def table(section: str) -> dict[str, tuple[str, str]]:
    """field -> (what happens, the rest) of one section's first table."""
    text = DOCUMENT.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return {name: (fate, rest.strip()) for name, fate, rest in _ROW.findall(text)}


def fields_of(typed_dict: Any) -> set[str]:
    return set(typing.get_type_hints(typed_dict))


PACKAGE = {
    "Chat completions": fields_of(chat_create_params.CompletionCreateParamsBase) | {"stream"},
    "Completions": fields_of(completion_create_params.CompletionCreateParamsBase) | {"stream"},
    "Embeddings": fields_of(embedding_create_params.EmbeddingCreateParams),
    "Models": set(Model.model_fields),
}
ROWS = [(section, name, *row) for section in ENDPOINTS for name, row in table(section).items()]


@pytest.mark.parametrize("section", PACKAGE)
def test_the_table_has_every_field_of_the_package_and_no_other(section: str) -> None:
    assert set(table(section)) == PACKAGE[section]


@pytest.mark.parametrize(("section", "name", "fate", "rest"), ROWS)
async def test_smp_08_every_field_meets_the_fate_that_is_documented(
    section: str, name: str, fate: str, rest: str
) -> None:
    model, body, path = ENDPOINTS[section]
    if fate in ("honoured", "mapped"):
        assert name in model.model_fields
    elif fate == "ignored":
        assert parse(model, {**body, name: {"a": 1}}).ignored == (name,)
    else:
        assert fate == "refused"
        app = create_app(Settings(redis_url=NOWHERE))
        async with client_of(app) as client:
            value = REFUSED_VALUES.get(name, {"a": 1})
            response = await client.post(path, json={**body, name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        harmless = re.findall(r"`([^`]+)`", rest.split(";")[0]) if rest.startswith("except") else []
        assert len(harmless) == len(model.UNSUPPORTED[name])
        for spelled, accepted in zip(harmless, model.UNSUPPORTED[name], strict=True):
            assert json.loads(spelled) == accepted
            assert parse(model, {**body, name: accepted})


def test_effort_goes_to_templates_that_read_it() -> None:
    low = parse(ChatCompletionRequest, {**CHAT, "reasoning_effort": "low"})
    thinking = served("{{ reasoning_effort }}")
    assert prepare_chat(low, thinking).prompts == (tuple(token_ids("low")),)
    with pytest.raises(InvalidRequest) as error:
        prepare_chat(low, served())
    assert error.value.param == "reasoning_effort"
    assert prepare_chat(parse(ChatCompletionRequest, {**CHAT, "reasoning_effort": "none"}), served())
