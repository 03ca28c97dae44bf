"""Outputs of a model that never wants to end, under schemas that do not make it: each is a whole document in time."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from shared.grammars.backend import fill_masks
from shared.grammars.compiler import GrammarCompiler
from shared.grammars.ending import MAX_DIGITS, reserved_tokens
from shared.params import GrammarSpec
from tests.support.toy_tokenizers import byte_level
from tests.unit.shared.grammars.test_compiler import END, compiler_for

COMPILER, TABLE, SIZE = compiler_for(byte_level())


def stubborn(schema: Any, wish: bytes, max_tokens: int, compiler: GrammarCompiler = COMPILER) -> str:
    """What a model writes that takes the first byte of `wish` that is allowed, and ends when it must."""
    matcher = compiler.matcher(GrammarSpec("json_schema", json.dumps(schema)), max_tokens)
    output: list[int] = []
    while len(output) < max_tokens:
        matcher.follow(output)
        allowed = np.flatnonzero(fill_masks([matcher], SIZE)[0]).tolist()
        assert allowed, "nothing can follow"
        if allowed == [END]:
            return b"".join(map(TABLE.bytes_of, output)).decode()
        by_byte = {TABLE.bytes_of(token): token for token in allowed if token != END}
        wished = [by_byte[bytes([byte])] for byte in wish if bytes([byte]) in by_byte]
        output.append((wished or list(by_byte.values()))[0])
    raise AssertionError(f"no end: {b''.join(map(TABLE.bytes_of, output))!r}")


def parts_of(number: str) -> dict[str, int]:
    match = re.fullmatch(r"-?(\d+)(?:\.(\d+))?(?:[eE][+-]?(\d+))?", number)
    assert match
    return dict(zip(MAX_DIGITS, (len(part or "") for part in match.groups()), strict=True))


@pytest.mark.parametrize("wish", [b"7", b"7.", b".7", b"7e", b"e7", b"-7e+"])
@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "number", "minimum": -3, "maximum": 8}])
def test_a_number_ends(schema: Any, wish: bytes) -> None:
    text = stubborn(schema, wish, 5000)
    jsonschema.validate(json.loads(text), schema)
    assert all(length <= MAX_DIGITS[part] for part, length in parts_of(text).items()), text


def test_numbers_of_64_bits_and_floats_have_room() -> None:
    assert len(str(2**64 - 1)) <= MAX_DIGITS["whole"]
    assert len(repr(0.1 + 0.2).removeprefix("0.")) <= MAX_DIGITS["fraction"]


@pytest.mark.parametrize("value", [10**30, 0.12345678901234567890123, "1" * 60])
def test_what_the_schema_asks_for_is_longer_than_any_bound(value: Any) -> None:
    assert json.loads(stubborn({"const": value}, b"1", 500)) == value


def test_digits_of_a_text_are_not_a_number() -> None:
    text = stubborn({"type": "string", "minLength": 50, "maxLength": 60}, b"7", 500)
    assert json.loads(text) == "7" * 60


ENDLESS = [
    ({"type": "string"}, b"a"),
    ({"type": "string"}, b"\\n"),
    ({"type": "array", "items": {"type": "string"}}, b'[,"a'),
    ({"type": "array", "items": {"type": "integer"}}, b" \n[,1"),
    ({"type": "object"}, b'{,"a:'),
    ({}, b'[{"a:,'),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "number"}}},
            "required": ["a", "b"],
        },
        b'{"x',
    ),
]


@pytest.mark.parametrize(("schema", "wish"), ENDLESS)
@pytest.mark.parametrize("max_tokens", [100, 1000])
def test_a_document_is_whole_before_its_tokens_are_used_up(schema: Any, wish: bytes, max_tokens: int) -> None:
    text = stubborn(schema, wish, max_tokens)
    jsonschema.validate(json.loads(text), schema)
    assert len(text) >= 0.9 * (max_tokens - reserved_tokens(max_tokens)), "nothing is shortened before it must be"


def test_every_open_bracket_has_its_token() -> None:
    schema = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
    jsonschema.validate(json.loads(stubborn(schema, b"[", 200)), schema)


def test_a_matcher_that_starts_with_output_narrows_as_one_that_went_along() -> None:
    spec = GrammarSpec("json_schema", json.dumps({"type": "array", "items": {"type": ["string", "number"]}}))
    stepwise = COMPILER.matcher(spec, 60)
    output: list[int] = []
    for wish in b'["a\\"b",12.5e1,"' + b"x" * 60:
        stepwise.follow(output)
        fresh = COMPILER.matcher(spec, 60)
        fresh.follow(output)
        masks = fill_masks([stepwise, fresh], SIZE)
        assert (masks[0] == masks[1]).all()
        allowed = np.flatnonzero(masks[0]).tolist()
        if allowed == [END]:
            break
        output.append(next((token for token in allowed if TABLE.bytes_of(token) == bytes([wish])), allowed[0]))
    assert len(output) < 60


def test_other_grammars_are_as_they_are_written() -> None:
    matcher = COMPILER.matcher(GrammarSpec("regex", "[0-9]{60}"), 64)
    matcher.follow([])
    before = np.flatnonzero(fill_masks([matcher], SIZE)[0]).tolist()
    assert [TABLE.bytes_of(token) for token in before] == [bytes([byte]) for byte in b"0123456789"]
