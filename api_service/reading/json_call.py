"""One tool call as a JSON object, read character by character: {"name": …, "arguments": {…}}, keys in any order.

In: characters. Out: start and arguments into a sink, the arguments as the model spells them, as soon as the name is
known. Arguments given as a string of JSON are unwrapped, so that they are never encoded twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from enum import Enum

from api_service.reading.pieces import Sink

__all__ = ["JsonCall", "Status"]

_ARGUMENT_KEYS = ("arguments", "parameters")


class Status(Enum):
    OPEN = "open"
    DONE = "done"
    """The closing brace was read."""
    FAILED = "failed"
    """This is no call, or not one of a known function."""


class JsonCall:
    """`names`: functions that may be called; None allows any."""

    def __init__(self, sink: Sink, names: Container[str] | None = None) -> None:
        self._sink = sink
        self._names = names
        self._state: Callable[[str], Status] = self._before
        self._key = ""
        self._raw: list[str] = []
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._late_arguments: str | None = None
        self._streamed = False
        self.started = False
        """The name is known and was said."""

    @property
    def complete(self) -> bool:
        """Name and arguments are both there; only the closing brace is missing."""
        return self.started and self._late_arguments is not None and self._state == self._between

    def feed(self, char: str) -> Status:
        """The status after this character. A failed or done call takes no more."""
        return self._state(char)

    def _before(self, char: str) -> Status:
        if char == "{":
            self._state = self._between
            return Status.OPEN
        return Status.OPEN if char.isspace() else Status.FAILED

    def _between(self, char: str) -> Status:
        """Before a key, after a value."""
        if char == '"':
            self._raw, self._quoted = [char], True
            self._state = self._in_key
        elif char == "}":
            return self._close()
        elif not char.isspace() and char != ",":
            return Status.FAILED
        return Status.OPEN

    def _in_key(self, char: str) -> Status:
        self._raw.append(char)
        self._track(char)
        if self._quoted:
            return Status.OPEN
        key = _decoded("".join(self._raw))
        if not isinstance(key, str):
            return Status.FAILED
        self._key, self._state = key, self._colon
        return Status.OPEN

    def _colon(self, char: str) -> Status:
        if char == ":":
            self._state = self._value_start
            return Status.OPEN
        return Status.OPEN if char.isspace() else Status.FAILED

    def _value_start(self, char: str) -> Status:
        if char.isspace():
            return Status.OPEN
        if char in ",}]:":
            return Status.FAILED
        self._raw, self._depth, self._quoted, self._escaped = [], 0, False, False
        self._streamed = self._key in _ARGUMENT_KEYS and self.started and char == "{"
        self._state = self._in_value
        return self._in_value(char)

    def _in_value(self, char: str) -> Status:
        bare = self._depth == 0 and not self._quoted
        if bare and self._raw and (char in ",}" or char.isspace()):  # the end of a number or a word
            if not self._finish_value():
                return Status.FAILED
            self._state = self._between
            return self._between(char)
        self._take(char)
        was_quoted = self._quoted
        self._track(char)
        if self._depth == 0 and not self._quoted and (was_quoted or char in "}]"):
            self._state = self._between
            return Status.OPEN if self._finish_value() else Status.FAILED
        return Status.OPEN

    def _take(self, char: str) -> None:
        self._raw.append(char)
        if self._streamed:
            self._sink.arguments(char)

    def _track(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = char == "\\"
            self._quoted = char != '"'
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _finish_value(self) -> bool:
        raw = "".join(self._raw)
        if self._key == "name" and not self.started:
            name = _decoded(raw)
            if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
                return False
            self._sink.start(name)
            self.started = True
            if self._late_arguments is not None:
                self._sink.arguments(self._late_arguments)
        elif self._key in _ARGUMENT_KEYS and not self._streamed:
            arguments = _unwrapped(raw)
            if self.started and self._late_arguments is None:
                self._sink.arguments(arguments)
            self._late_arguments = arguments
        elif self._streamed:
            self._late_arguments = raw
        return True

    def _close(self) -> Status:
        if not self.started:
            return Status.FAILED
        if self._late_arguments is None:
            self._sink.arguments("{}")
        return Status.DONE


def _decoded(raw: str) -> object:
    try:
        return json.loads(raw, strict=False)
    except ValueError:
        return None


def _unwrapped(raw: str) -> str:
    """JSON text of the arguments: a string is taken as JSON itself, nothing as no arguments."""
    value = _decoded(raw)
    if isinstance(value, str):
        return value.strip() or "{}"
    return "{}" if value is None else raw
