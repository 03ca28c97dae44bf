"""What a pod says of a grammar before it queues the request, and that it always says it soon."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shared.grammars.backend import GrammarError
from shared.grammars.checker import MAX_CHARACTERS, GrammarChecker
from shared.grammars.repeats import check_pattern
from shared.params import GrammarSpec

NESTED = [{"type": "string", "pattern": f"(a|b)*{'ab'[i % 2]}(a|b){{{i}}}"} for i in range(20)]

REFUSED: dict[str, Any] = {
    "unknown type": {"type": "foo"},
    "properties no object": {"properties": 5},
    "required no list": {"required": "x"},
    "empty enum": {"enum": []},
    "ref to nowhere": {"$ref": "#/$defs/x"},
    "ref to itself": {"$ref": "#"},
    "circle of refs": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "open group": {"type": "string", "pattern": "("},
    "open class": {"type": "string", "pattern": "[a-"},
    "look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "minimum above maximum": {"type": "integer", "minimum": 5, "maximum": 3},
    "pattern against length": {"type": "string", "pattern": "^a$", "minLength": 5},
    "keyword without support": {"not": {"type": "string"}},
    "remote ref": {"$ref": "http://example.com/x.json"},
    "exponential allOf": {
        "allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(4)]} for i in range(10)]
    },
    "endless intersection": {"allOf": NESTED},
}

ACCEPTED: dict[str, Any] = {
    "recursive list": {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    },
    "10,000 values": {"enum": [f"value {i}" for i in range(10_000)]},
    "1,000 properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}},
    "format": {"type": "string", "format": "email"},
    "tagged union": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")
        ]
    },
}


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


def spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


@pytest.mark.parametrize("name", REFUSED)
def test_str_01_str_02_unusable_schemas_are_refused_with_a_reason(checker: GrammarChecker, name: str) -> None:
    with pytest.raises(GrammarError, match=r"\w{3}"):
        checker.check(spec(REFUSED[name]))


@pytest.mark.parametrize("name", ACCEPTED)
def test_str_02_large_and_recursive_schemas_are_accepted(checker: GrammarChecker, name: str) -> None:
    checker.check(spec(ACCEPTED[name]))


def test_str_03_the_helper_is_replaced_after_it_had_to_be_given_up(checker: GrammarChecker) -> None:
    started = time.monotonic()
    with pytest.raises(GrammarError, match="too complex"):
        checker.check(spec(REFUSED["endless intersection"]))
    assert time.monotonic() - started < 10  # a second of processor time; this machine may be busy
    checker.check(spec({"type": "integer"}))
    with pytest.raises(GrammarError, match="too complex"):  # remembered, not tried again
        checker.check(spec(REFUSED["endless intersection"]))


@pytest.mark.parametrize(
    "pattern", ["a{10001}", "(a{1,100000}){1,1000}", "a{3,99999999999999999999}", "a{ 1 , 20000 }"]
)
def test_str_03_repetitions_are_bounded(pattern: str) -> None:
    with pytest.raises(GrammarError, match="repeats"):
        check_pattern(pattern)


@pytest.mark.parametrize(
    "text",
    [
        "start: /x{20000}/",
        "start: /x{5,20000}/i",
        'start: "a\\"/" T\nT: /[\\/"]{20000}/',
        'start: "x" // a comment: "\n | /y{ 1 , 20000 }/',
        'start: %json {"type": "string", "pattern": "^x{20000}$"}',
        'start: %json {"anyOf": [{"patternProperties": {"x{20000}": {}}}]}',
    ],
)
def test_str_03_repetitions_in_lark_are_bounded(checker: GrammarChecker, text: str) -> None:
    with pytest.raises(GrammarError, match="repeats more than 10000 times"):
        checker.check(GrammarSpec("lark", text))


@pytest.mark.parametrize(
    "text",
    [
        "start: /x{10000}/",
        'start: "/x{20000}/"',
        'start: "{20000}" /a/ # /x{20000}/',
        '// /x{20000}/\nstart: "x"',
        r"start: /\/x\{20000}/",
        'start: %json {"type": "string", "const": "/x{20000}/"}',
        'root ::= "/x{20000}/" [a-z]+',
    ],
)
def test_what_is_no_repetition_in_lark_is_not_counted(checker: GrammarChecker, text: str) -> None:
    checker.check(GrammarSpec("lark", text))


@pytest.mark.parametrize(
    "pattern", [r"^[a-z]{1,64}\{\d{2,}$", r"\x{20000}", r"\u{20000}", r"\U{20000}", r"\{20000\}", r"\\\x{20000}", r"\\"]
)
def test_what_is_no_repetition_is_not_counted(checker: GrammarChecker, pattern: str) -> None:
    check_pattern(pattern)
    checker.check(GrammarSpec("regex", pattern))


@pytest.mark.parametrize("pattern", [r"\\x{20000}", r"\d{20000}", r"\x{41}{20000}", "a\\\n{20000}", r"\pL{20000}"])
def test_escapes_hide_no_repetition(pattern: str) -> None:
    with pytest.raises(GrammarError, match="repeats"):
        check_pattern(pattern)


@pytest.mark.parametrize("pattern", ["a\\", "\\", "\\\\\\"])
def test_a_pattern_that_ends_within_an_escape_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="ends with a backslash"):
        check_pattern(pattern)


WRONG_PATTERNS = {
    r"\u{110000}": "hexadecimal literal is not a Unicode scalar value near '110000'",
    r"\x{110000}": "hexadecimal literal is not a Unicode scalar value near '110000'",
    r"a\uD800": "hexadecimal literal is not a Unicode scalar value near 'D800'",
    r"\u{D800}": "hexadecimal literal is not a Unicode scalar value near 'D800'",
    r"\p{20000}": "Unicode property not found near '\\p{20000}'",
    r'"b/\q"': "unrecognized escape sequence near '\\q'",
    "b\n\\q": "unrecognized escape sequence near '\\q'",
    "x" * 1000 + r"\q": "unrecognized escape sequence near '\\q'",
    r"(a)\1": "backreferences are not supported near '\\1'",
    "b{5,2}": "invalid repetition count range, the start must be <= the end near '{5,2}'",
    "(" * 1000: "unclosed group near '('",
    "[z-a]": "invalid character class range, the start must be <= the end near 'z-a'",
}


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
@pytest.mark.parametrize("pattern", WRONG_PATTERNS, ids=lambda pattern: pattern[-12:])
def test_the_reason_is_what_is_wrong_with_the_pattern(checker: GrammarChecker, kind: str, pattern: str) -> None:
    check_pattern(pattern)
    given = GrammarSpec("regex", pattern) if kind == "regex" else spec({"type": "string", "pattern": pattern})
    with pytest.raises(GrammarError) as refused:
        checker.check(given)
    assert str(refused.value) == f"invalid regex: {WRONG_PATTERNS[pattern]}"


@pytest.mark.parametrize("text", ["x" * 1000 + r"\b", r'"\b'])
def test_what_is_valid_but_not_supported_is_said_so(checker: GrammarChecker, text: str) -> None:
    with pytest.raises(GrammarError, match=r"^invalid regex: lookarounds not supported"):
        checker.check(GrammarSpec("regex", text))


def test_too_large_is_not_called_an_error_of_the_lexer(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarError, match=r"^it is too complex"):
        checker.check(GrammarSpec("regex", "(a{1000}){1000}"))


def test_a_text_beyond_the_limit_is_refused(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarError, match="characters"):
        checker.check(GrammarSpec("regex", "a" * (MAX_CHARACTERS + 1)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", "[0-9]{3}"), ("lark", 'start: "a" | "b"'), ("lark", 'root ::= "a" b\nb ::= [0-9]+')],
)
def test_other_kinds_are_accepted(checker: GrammarChecker, kind: Any, text: str) -> None:
    checker.check(GrammarSpec(kind, text))


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", "("), ("lark", "start: start"), ("lark", "start: missing"), ("lark", "root ::= (" * 5000)],
)
def test_other_kinds_are_refused(checker: GrammarChecker, kind: Any, text: str) -> None:
    with pytest.raises(GrammarError):
        checker.check(GrammarSpec(kind, text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= a", "Rule 'a' not found"),
        ('x ::= "a"', "No 'root' rule found"),
        ("root ::= (" + "(" * 5000, "nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_gbnf_grammar_is_said_and_ends_no_helper(
    checker: GrammarChecker, text: str, reason: str
) -> None:
    checker.check(GrammarSpec("lark", 'root ::= "a" b\nb ::= "b"'))
    helper = checker._helper
    with pytest.raises(GrammarError, match=reason):
        checker.check(GrammarSpec("lark", text))
    assert helper is not None
    assert checker._helper is helper
