"""Every format at every cut: what is streamed, joined, is what the whole text gives; and what that is."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_service.reading.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from api_service.reading.reader import AnswerReader, finish_reason
from shared.messages import Reading

NAMES = ("area", "pick_color")


def reading(parser: str = "", **more: Any) -> Reading:
    return Reading(parser=parser, names=NAMES, **more)


def joined(pieces: list[Piece]) -> dict[str, Any]:
    calls: list[list[str]] = []
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": calls}
    for piece in pieces:
        if isinstance(piece, Content):
            said["content"] += piece.text
        elif isinstance(piece, Reasoning):
            said["reasoning"] += piece.text
        elif isinstance(piece, CallStart):
            assert piece.index == len(calls)
            calls.append([piece.name, ""])
        else:
            assert isinstance(piece, CallArguments)
            assert piece.index == len(calls) - 1
            calls[piece.index][1] += piece.text
    return said


def read(how: Reading, text: str, cuts: list[int] | None = None, reason: str = "stop") -> dict[str, Any]:
    reader = AnswerReader(how)
    ends = [0, *sorted(cuts or []), len(text)]
    pieces = [piece for start, end in pairwise(ends) for piece in reader.push(text[start:end])]
    return joined(pieces + reader.finish(reason))


TWO = [["area", '{"r": 2}'], ["pick_color", '{"color": "te\\"al}"}']]
TEAL = '{"color": "te\\"al}"}'
CASES: list[tuple[str, str, str, list[list[str]]]] = [
    ("hermes", '<tool_call>\n{"name": "area", "arguments": {"r": 2}}\n</tool_call>', "", [TWO[0]]),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "area", "arguments": {"r": 2}}</tool_call>\n'
        f'<tool_call>{{"arguments": {TEAL}, "name": "pick_color"}}</tool_call>',
        "Let me see.",
        TWO,
    ),
    (
        "hermes",
        '<tool_call>{"name": "area", "arguments": {"r": 2}}<tool_call>{"name": "area"}',
        "",
        [TWO[0], ["area", "{}"]],
    ),
    ("hermes", "a <b> <tool_cal <tool_call>no json</tool_call>", "a <b> <tool_cal <tool_call>no json</tool_call>", []),
    ("hermes", '<tool_call>{"name": "area", "arguments": "{\\"r\\": 2}"}</tool_call>', "", [TWO[0]]),
    ("llama3_json", '{"name": "area", "parameters": {"r": 2}}', "", [TWO[0]]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "area", "parameters": {{"r": 2}}}}; {{"name": "pick_color", "parameters": {TEAL}}}',
        "",
        TWO,
    ),
    ("llama3_json", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ("llama3_json", "The area is {r}.", "The area is {r}.", []),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "area", "arguments": {{"r": 2}}}}, {{"name": "pick_color", "arguments": {TEAL}}}]',
        "",
        TWO,
    ),
    ("mistral", '[{"name": "area", "arguments": {"r": 2}}]', "", [TWO[0]]),
    ("mistral", 'I look.[TOOL_CALLS]area[ARGS]{"r": 2}[TOOL_CALLS]area{"r": 2}', "I look.", [TWO[0], TWO[0]]),
    ("mistral", "[1] is a footnote.", "[1] is a footnote.", []),
    ("json", '{"name": "area", "arguments": {"r": 2}}', "", [TWO[0]]),
    ("json", '{"id": 5, "ok": true, "name": "area", "arguments": {"r": 2}, "more": [1, {"a": "}"}]}', "", [TWO[0]]),
    ("json", '{"answer": 42}', '{"answer": 42}', []),
    ("json", "Hi [there]", "Hi [there]", []),
    ("pythonic", '[area(r=2), pick_color(color="te\\"al}")]', "", TWO),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "Hello (you)", "Hello (you)", []),
    ("", '<tool_call>{"name": "area"}</tool_call>', '<tool_call>{"name": "area"}</tool_call>', []),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_tls_02_every_format_at_every_cut(parser: str, text: str, content: str, calls: list[list[str]]) -> None:
    how = reading(parser)
    whole = read(how, text)
    assert whole == {"content": content, "reasoning": "", "calls": calls}
    assert read(how, text, list(range(len(text)))) == whole
    for cut in range(len(text)):
        assert read(how, text, [cut]) == whole


@pytest.mark.parametrize(("parser", "text"), [case[:2] for case in CASES if case[3]])
def test_tls_07_an_answer_cut_off_anywhere_reads_alike_and_shows_no_markup(parser: str, text: str) -> None:
    how = reading(parser)
    calls = read(how, text)["calls"]
    for length in range(len(text)):
        part = read(how, text[:length], reason="length")
        assert part == read(how, text[:length], list(range(length)), reason="length")
        assert "<tool_call" not in part["content"]
        assert "[TOOL_CALLS" not in part["content"]
        for got, whole in zip(part["calls"], calls, strict=False):
            assert got[0] == whole[0]
            assert whole[1].startswith(got[1]) or parser == "pythonic"


@pytest.mark.parametrize("parser", ["", "hermes", "llama3_json", "mistral", "json", "pythonic"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_text_depends_on_where_it_was_cut(parser: str, data: st.DataObject) -> None:
    snippets = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        '{"name": "area", "arguments": ',
        '{"r": 2}',
        "}",
    ]
    snippets += ["[", "]", "area(", "r=2)", '"', "\\", " ", "\n", "<think>", "</think>", "é🫠", ",", ";", "name"]
    text = "".join(data.draw(st.lists(st.sampled_from(snippets), max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    how = reading(parser, think=data.draw(st.sampled_from(["", "open", "maybe"])))
    assert read(how, text, cuts, reason) == read(how, text, None, reason)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "json", "pythonic"])
@given(text=st.text(alphabet="ab <tool_cl>[{\"':,x", max_size=30))
@settings(max_examples=60, deadline=None)
def test_text_without_a_call_comes_out_as_it_went_in(parser: str, text: str) -> None:
    assert read(reading(parser), text)["content"] == text


def test_a_named_call_is_the_whole_text() -> None:
    how = reading("json", named="area")
    assert read(how, '{"r": 2}', [3])["calls"] == [TWO[0]]
    assert read(how, "", reason="length")["calls"] == [["area", ""]]


def test_a_forced_list_is_never_content() -> None:
    text = '[{"name": "area", "arguments": {"r": 2}}, {"name": "pick_color", "arguments": ' + TEAL + "}]"
    how = reading("json", forced=True)
    assert read(how, text)["calls"] == TWO
    for length in range(len(text)):
        assert read(how, text[:length], reason="length")["content"] == ""


def test_tls_09_arguments_are_json_of_an_object() -> None:
    for text in ('{"name": "area", "arguments": {"r": 2}}', '{"name": "area", "arguments": "{\\"r\\": 2}"}'):
        [[_, arguments]] = read(reading("json"), text)["calls"]
        assert json.loads(arguments) == {"r": 2}


@pytest.mark.parametrize(
    ("think", "text", "reasoning", "content"),
    [
        ("open", "I wonder.</think>\n\nYes.", "I wonder.", "\n\nYes."),
        ("maybe", "<think>Hm</think>Yes.", "Hm", "Yes."),
        ("maybe", "\n<think>Hm", "Hm", ""),
        ("maybe", "Yes. <think>", "", "Yes. <think>"),
        ("open", "a < b </thin", "a < b </thin", ""),
        ("", "<think>Hm</think>Yes.", "", "<think>Hm</think>Yes."),
    ],
)
def test_reasoning_is_split_off(think: str, text: str, reasoning: str, content: str) -> None:
    how = Reading(think=think)
    for cuts in (None, list(range(len(text)))):
        said = read(how, text, cuts)
        assert (said["reasoning"], said["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("how", "reason", "calls", "expected"),
    [
        (reading("hermes"), "stop", 1, "tool_calls"),
        (reading("json", forced=True), "stop", 1, "tool_calls"),
        (reading("json", named="area"), "stop", 1, "stop"),
        (reading("hermes"), "stop", 0, "stop"),
        (reading("hermes"), "length", 1, "length"),
        (reading("json", named="area"), "length", 1, "length"),
    ],
)
def test_tls_03_finish_reasons(how: Reading, reason: str, calls: int, expected: str) -> None:
    assert finish_reason(how, reason, calls) == expected
