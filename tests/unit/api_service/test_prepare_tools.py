"""Tools in the prompt and the grammars that enforce calls."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from api_service.prepare.chat import prepare_chat
from api_service.prepare.tools import tool_parser
from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import parse
from shared.errors import InvalidRequest
from shared.messages import GenerateRequest
from tests.support import toy_tokenizers
from tests.support.scripted_worker import TEMPLATE
from tests.support.served import served

BRANCH = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
COLORS = {
    "type": "object",
    "properties": {"color": {"$ref": "#/$defs/c"}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": {**COLORS, "$defs": {"c": {"enum": ["teal"]}}}}}
PLAIN = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "pick"}}


def prepared(template: str = TEMPLATE, messages: Any = None, **fields: Any) -> GenerateRequest:
    body = {"model": "m", "messages": messages or [{"role": "user", "content": "x"}], **fields}
    model = served(template, max_model_len=4096, max_request_tokens=4096)
    return prepare_chat(parse(ChatCompletionRequest, body), model)


def prompt(request: GenerateRequest) -> str:
    text: str = toy_tokenizers.byte_level().decode(list(request.prompts[0]), skip_special_tokens=False)
    return text


def test_a_template_without_tools_gets_a_section_in_the_system_turn() -> None:
    for messages in (None, [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}]):
        text = prompt(prepared(messages=messages, tools=[TOOL]))
        assert text.count("<|im_start|>system") == 1
        assert json.dumps(TOOL) in text
        assert "<tool_call>" in text
    assert "Be kind.\n\nYou may call" in text


def test_a_template_with_tools_shows_them_itself() -> None:
    text = prompt(prepared(BRANCH, tools=[TOOL]))
    assert '"pick"' in text
    assert "<tools>" not in text


def test_tls_10_none_offers_nothing() -> None:
    request = prepared(tools=[TOOL], tool_choice="none")
    assert request.reading is None
    assert request.prompts == prepared().prompts


def test_control_tokens_in_a_description_stay_text() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
    for template in (TEMPLATE, BRANCH):
        assert prepared(template, tools=[tool]).prompts[0].count(2) == prepared(template, tools=[PLAIN]).prompts[
            0
        ].count(2)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (TEMPLATE, "hermes"),
        (BRANCH + "<tool_call>", "hermes"),
        (BRANCH + "[TOOL_CALLS]", "mistral"),
        (BRANCH + "<|python_tag|>", "llama3_json"),
        (BRANCH + "func_name1(", "pythonic"),
        (BRANCH, "json"),
    ],
)
def test_the_parser_is_chosen_by_the_template(template: str, parser: str) -> None:
    assert tool_parser(served(template)) == parser


def test_a_named_call_is_the_functions_own_schema() -> None:
    request = prepared(tools=[PLAIN, TOOL], tool_choice=NAMED)
    assert request.sampling.grammar is not None
    assert json.loads(request.sampling.grammar.text) == TOOL["function"]["parameters"]  # type: ignore[index]
    assert request.reading is not None
    assert request.reading.named == "pick"


def test_a_required_call_is_a_list_whose_references_hold() -> None:
    request = prepared(tools=[PLAIN, TOOL], tool_choice="required")
    assert request.sampling.grammar is not None
    schema = json.loads(request.sampling.grammar.text)
    jsonschema.validate([{"name": "pick", "arguments": {"color": "teal"}}, {"name": "now", "arguments": {}}], schema)
    for wrong in ([], [{"name": "pick", "arguments": {"color": "red"}}], [{"name": "other", "arguments": {}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    single = prepared(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).sampling.grammar
    assert single is not None
    assert json.loads(single.text)["maxItems"] == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_parameters_that_cannot_be_enforced_are_refused_by_their_place(choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}
    with pytest.raises(InvalidRequest) as caught:
        prepared(tools=[tool], tool_choice=choice)
    assert caught.value.param == "tools[0].function.parameters"
    assert prepared(tools=[tool]).sampling.grammar is None


def test_a_marker_that_is_a_special_token_is_kept_in_the_text() -> None:
    assert prepared(tools=[TOOL]).stop.skip_special_tokens


def test_the_old_function_messages_are_mapped() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    text = prompt(prepared(messages=messages))
    assert '{"name": "now", "arguments": {}}' in text
    assert "<tool_response>\nnoon" in text


@pytest.mark.parametrize("fields", [{"guided_regex": "a+"}, {"response_format": {"type": "json_object"}}])
def test_a_grammar_for_the_whole_answer_leaves_no_room_for_reasoning(fields: dict[str, Any]) -> None:
    reading = prepared(TEMPLATE + "{{ '<think>\n' }}", **fields).reading
    assert reading is None or reading.think == ""


@pytest.mark.parametrize(
    ("template", "think"),
    [(TEMPLATE, None), (TEMPLATE + "{# <think> #}", "maybe"), (TEMPLATE + "{{ '<think>\n' }}", "open")],
)
def test_reasoning_is_expected_by_the_template(template: str, think: str | None) -> None:
    reading = prepared(template).reading
    assert (reading.think if reading else None) == think
