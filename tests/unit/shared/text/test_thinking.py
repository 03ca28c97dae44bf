"""Reasoning tokens: those whose text lies before the end of the closing tag, however the text is cut into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_service.reading.pieces import Reasoning
from api_service.reading.reader import AnswerReader
from shared.messages import Reading
from shared.text.thinking import ReasoningCounter

SNIPPETS = ["<think>", "</think>", "<", "/", "think>", "a", " ", "\n", "é🫠", "</thin", ""]


def counted(think: str, tokens: list[str]) -> list[int]:
    """The count after each token."""
    counter, counts = ReasoningCounter(think), []
    for token in tokens:
        counter.push(token)
        counts.append(counter.tokens)
    return counts


@pytest.mark.parametrize(
    ("think", "tokens", "counts"),
    [
        ("open", ["I", " wonder", "</think>", "Yes"], [1, 2, 3, 3]),
        ("open", ["I", "</", "think", ">\n", "Yes"], [1, 2, 3, 4, 4]),
        ("open", ["", "é", "", "!"], [1, 2, 3, 4]),
        ("maybe", ["\n", "<th", "ink>", "Hm", "</think>", "Yes"], [0, 0, 3, 4, 5, 5]),
        ("maybe", ["<think></think>", "Yes"], [1, 1]),
        ("maybe", ["Yes", "<think>", "no"], [0, 0, 0]),
        ("maybe", ["<th", "e"], [0, 0]),
        ("", ["<think>", "a", "</think>"], [0, 0, 0]),
    ],
)
def test_tokens_are_counted_up_to_the_closing_tag(think: str, tokens: list[str], counts: list[int]) -> None:
    assert counted(think, tokens) == counts


@given(st.sampled_from(["open", "maybe", ""]), st.lists(st.lists(st.sampled_from(SNIPPETS), max_size=3).map("".join)))
def test_it_agrees_with_what_clients_are_shown_as_reasoning(think: str, tokens: list[str]) -> None:
    """Some reasoning text was shown exactly if tokens were counted, and none comes after the last one counted."""
    total = counted(think, tokens)[-1] if tokens else 0
    reader = AnswerReader(Reading(think=think))
    shown = [any(isinstance(piece, Reasoning) for piece in reader.push(token)) for token in tokens]
    shown_at_all = any(shown) or any(isinstance(piece, Reasoning) for piece in reader.finish("stop"))
    assert not any(shown[total:])
    assert total or not shown_at_all
