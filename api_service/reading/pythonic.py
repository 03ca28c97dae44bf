"""Llama 4 and others: the whole answer is a Python list of calls, [area(r=2), pick(color="teal")].

A call's name is said as soon as its parenthesis opens, its arguments, turned into JSON, when it closes.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Container

from api_service.reading.pieces import Sink

__all__ = ["PythonicFormat"]


class PythonicFormat:
    def __init__(self, sink: Sink, names: Container[str]) -> None:
        self._sink = sink
        self._names = names
        self._held = ""
        self._call = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._mode = "start"

    def feed(self, char: str) -> None:
        self._held += char
        if self._mode == "content":
            self._flush()
        elif self._mode == "start":
            if char == "[":
                self._mode = "name"
            elif not char.isspace():
                self._flush()
        elif self._mode == "name":
            self._in_name(char)
        else:
            self._in_arguments(char)

    def end(self, *, cut: bool) -> None:
        if not self._sink.num_calls and not (cut and self._mode == "name"):
            self._sink.content(self._held)

    def _in_name(self, char: str) -> None:
        if char == "(" and self._call.strip() in self._names and self._call.strip():
            self._sink.start(self._call.strip())
            self._mode, self._call, self._depth, self._held = "arguments", "", 1, ""
        elif char in ",]" and not self._call.strip() and self._sink.num_calls:
            self._call = ""
        elif char.isalnum() or char in "_.-" or char.isspace():
            self._call += char
        else:
            self._flush()

    def _in_arguments(self, char: str) -> None:
        self._track(char)
        if self._depth == 0:
            self._sink.arguments(_as_json(self._call))
            self._mode, self._call, self._held = "name", "", ""
        else:
            self._call += char

    def _track(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        else:
            self._depth += (char in "([{") - (char in ")]}")

    def _flush(self) -> None:
        self._mode = "content"
        self._sink.content(self._held)
        self._held = ""


def _as_json(arguments: str) -> str:
    """{"keyword": value, …}; what is no literal stays the text it is."""
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "{}"
    if not isinstance(call, ast.Call):
        return "{}"
    values = {keyword.arg: _literal(keyword.value) for keyword in call.keywords if keyword.arg}
    return json.dumps(values, ensure_ascii=False, default=str)


def _literal(node: ast.expr) -> object:
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return ast.unparse(node)
