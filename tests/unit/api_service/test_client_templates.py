"""Chat templates that clients send: refused unless the operator allows them, and harmless when they are allowed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from api_service.prepare import render
from api_service.prepare.chat import ChatOptions, prepare_chat
from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import parse
from shared.errors import InvalidRequest
from shared.messages import GenerateRequest
from tests.support.scripted_worker import token_ids
from tests.support.served import served

GOOD = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def prepare(template: str | None, *, trust: bool = True, **fields: Any) -> GenerateRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "chat_template": template, **fields}
    return prepare_chat(parse(ChatCompletionRequest, body), served(), ChatOptions(trust_template=trust))


def test_a_template_is_used_where_the_operator_allows_it() -> None:
    assert prepare(GOOD).prompts == (tuple(token_ids("[Hi]")),)
    assert prepare("{{ greeting }}", chat_template_kwargs={"greeting": "yo"}).prompts == (tuple(token_ids("yo")),)
    assert prepare(None, trust=False).prompts == prepare(None).prompts
    with pytest.raises(InvalidRequest, match="--trust-request-chat-template") as error:
        prepare(GOOD, trust=False)
    assert error.value.param == "chat_template"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.join(['a' * 1000000] * 3000) }}",
        "{% include 'x' %}",
    ],
)
def test_what_it_does_wrong_is_the_clients_400(template: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        prepare(template)
    assert len(error.value.message) < 300
    assert prepare(GOOD).prompts == (tuple(token_ids("[Hi]")),)


@pytest.mark.parametrize(
    "template",
    ["{{ (9 ** (9 ** 9)) % 7 }}", "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"],
)
def test_one_that_does_not_end_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside one expression, where a thread could not be stopped."""
    prepare(GOOD)  # the child is warm
    monkeypatch.setattr(render.render_chat, "__kwdefaults__", {**render.render_chat.__kwdefaults__, "limit_s": 0.5})
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match="too long") as error:
        prepare(template)
    assert error.value.param == "chat_template"
    assert time.monotonic() - started < 10
    monkeypatch.undo()
    assert prepare(GOOD).prompts == (tuple(token_ids("[Hi]")),)
