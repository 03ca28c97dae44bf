"""Chat messages that every way in refuses, with the place that the refusal names (cases MSG-03, ERR-02)."""

from __future__ import annotations

from typing import Any

__all__ = ["BAD_MESSAGES"]

BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    ({}, "messages"),
    ("hi", "messages"),
    ([None], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": 5, "content": "x"}], "messages[0].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
]
