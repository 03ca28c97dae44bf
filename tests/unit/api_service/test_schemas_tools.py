"""Tools and tool_choice in bodies: what is accepted, what is refused, and which parameter the refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bodies import chat, refused

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize(
    ("choice", "accepted"),
    [(None, True), ("none", True), ("auto", True), ("required", False), (NAMED, False), ("maybe", False), ({}, False)],
)
def test_tls_05_06_tool_choice_without_tools(tools: Any, choice: Any, accepted: bool) -> None:
    if accepted:
        chat(tools=tools, tool_choice=choice)
    else:
        assert refused(chat, tools=tools, tool_choice=choice).param == "tool_choice"


@pytest.mark.parametrize("choice", [None, "none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_tls_05_06_tool_choice_with_tools(choice: Any) -> None:
    offer = chat(tools=[TOOL], tool_choice=choice).offer()
    assert [function.name for function in offer.functions] == ([] if choice == "none" else ["f"])


@pytest.mark.parametrize(
    "choice", ["maybe", 5, {}, {"type": "function"}, {"type": "function", "function": {"name": "g"}}]
)
def test_tls_06_a_wrong_choice_is_refused(choice: Any) -> None:
    assert refused(chat, tools=[TOOL], tool_choice=choice).param == "tool_choice"


@pytest.mark.parametrize(
    "tool",
    [
        {},
        {"type": "function"},
        {"type": "custom", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "a b"}},
        {"type": "function", "function": {"name": "f", "parameters": 5}},
    ],
)
def test_bad_tools_are_refused_by_their_place(tool: Any) -> None:
    assert (refused(chat, tools=[TOOL, tool]).param or "").startswith("tools[1]")
