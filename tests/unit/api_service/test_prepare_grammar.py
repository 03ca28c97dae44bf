"""The fields of structured output -> one GrammarSpec, or a 400 that names the field."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from api_service.prepare.grammar import choice_pattern, output_grammar
from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import parse
from shared.errors import InvalidRequest
from shared.params import GrammarSpec
from tests.support.served import served


def grammar(**fields: Any) -> GrammarSpec | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return output_grammar(parse(ChatCompletionRequest, body), served())


def wrapped(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize("schema", [True, None, [], "str", 5, {"type": "foo"}, {"enum": []}, {"$ref": "#"}])
def test_str_01_a_bad_schema_is_refused_by_its_field(schema: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(response_format=wrapped(schema))
    assert (caught.value.param or "").startswith("response_format")


@pytest.mark.parametrize("name", [None, "", "a b", 5, "x" * 65])
def test_str_01_the_name_is_checked(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        grammar(response_format=wrapped({"type": "integer"}, name=name))


def test_str_01_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(80):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="nested"):
        grammar(response_format=wrapped(schema))


@pytest.mark.parametrize("pattern", ["(", "[a-", "(a{1,100000}){1,1000}"])
def test_str_03_a_bad_pattern_is_refused(pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    with pytest.raises(InvalidRequest):
        grammar(response_format=wrapped(schema))
    with pytest.raises(InvalidRequest, match="guided_regex"):
        grammar(guided_regex=pattern)


@pytest.mark.parametrize("format_", [None, {"type": "text"}])
def test_str_06_text_is_free(format_: Any) -> None:
    assert grammar(response_format=format_) is None


def test_str_06_an_unknown_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"response_format\.type"):
        grammar(response_format={"type": "xml"})


def test_str_07_a_schema_without_its_wrapper_is_honoured() -> None:
    spec = grammar(response_format={"type": "json_schema", "schema": {"type": "integer"}})
    assert spec == GrammarSpec("json_schema", '{"type":"integer"}')
    with pytest.raises(InvalidRequest, match="json_schema"):
        grammar(response_format={"type": "json_schema"})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "json_schema"),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "json_schema"),
        ({"structured_outputs": {"json_object": True}}, "json_schema"),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "regex"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark"),
        ({"guided_json": {"type": "integer"}}, "json_schema"),
        ({"guided_regex": "[0-9]+"}, "regex"),
        ({"guided_choice": ["a", "b"]}, "regex"),
        ({"guided_grammar": 'root ::= "a"'}, "lark"),
    ],
)
def test_every_way_to_ask_is_honoured(fields: dict[str, Any], kind: str) -> None:
    spec = grammar(**fields)
    assert spec is not None
    assert spec.kind == kind


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"type": "integer"}, "guided_regex": "a"},
        {"structured_outputs": {"json": {"type": "integer"}, "regex": "a"}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": [1]}},
        {"structured_outputs": {"regex": ""}},
        {"structured_outputs": {"regex": 5}},
        {"guided_json": "{"},
    ],
)
def test_contradictions_and_wrong_types_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        grammar(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "text", "schema": {"type": "integer"}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "shema": {}}}, "response_format.shema"),
        (
            {"response_format": {**wrapped({"type": "integer"}), "schema": {"type": "string"}}},
            "response_format.schema",
        ),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None, "json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {}, "guided_regex": "a"}, "structured_outputs"),
    ],
)
def test_nothing_is_accepted_without_effect(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("field", ["structured_outputs.grammar", "guided_grammar"])
def test_a_grammar_whose_terminal_repeats_too_often_is_refused_by_name(field: str) -> None:
    text = "start: /x{20000}/"
    with pytest.raises(InvalidRequest, match=f"'{re.escape(field)}' cannot be used: a pattern repeats") as caught:
        grammar(**({field: text} if "." not in field else {"structured_outputs": {"grammar": text}}))
    assert caught.value.param == field


def test_choices_match_literally() -> None:
    texts = ["a b", "x.y*", "é\n\"'", "(", "日本 🫠", "0"]
    pattern = re.sub(r"\\x\{([0-9A-F]+)\}", lambda match: re.escape(chr(int(match[1], 16))), choice_pattern(texts))
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert not re.fullmatch(pattern, "xzy")


def test_nothing_of_the_schema_is_lost_on_the_way() -> None:
    schema = {
        "type": "object",
        "properties": {"日本": {"const": 'a"b'}},
        "required": ["日本"],
        "additionalProperties": False,
    }
    spec = grammar(response_format=wrapped(schema, strict=True))
    assert spec is not None
    assert json.loads(spec.text) == schema
