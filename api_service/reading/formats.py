"""Tool-call formats of model families, each a machine over characters: content on one side, calls on the other.

A text that only looks like a call, in what has been read before its function's name, comes out as content unchanged.
Once a call has begun it stays one, cut off or not: streamed deltas cannot be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol

from api_service.reading.json_call import JsonCall, Status
from api_service.reading.pieces import Sink

__all__ = ["Format", "JsonFormat", "NamedFormat", "TaggedFormat"]


class Format(Protocol):
    def feed(self, char: str) -> None: ...

    def end(self, *, cut: bool) -> None:
        """`cut`: the answer was longer than it was allowed to be."""


class NamedFormat:
    """The whole answer is the arguments of one function: a grammar saw to it."""

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._name = name

    def feed(self, char: str) -> None:
        self._begin()
        self._sink.arguments(char)

    def end(self, *, cut: bool) -> None:
        self._begin()

    def _begin(self) -> None:
        if not self._sink.num_calls:
            self._sink.start(self._name)


class TaggedFormat:
    """Hermes and Qwen: <tool_call>{…}</tool_call>, several of them, text around."""

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""
        """Read, but not yet known to be content or markup."""
        self._call: JsonCall | None = None
        self._closing = False

    def feed(self, char: str) -> None:
        if self._call is not None:
            self._in_call(self._call, char)
        elif self._closing:
            self._after_call(char)
        else:
            self._hold(char)

    def end(self, *, cut: bool) -> None:
        # Half a tag of an answer that was cut off is markup; of one that ended by itself it is what the model said.
        if not cut and not self._closing and (self._call is None or not self._call.started):
            self._sink.content(self._held)

    def _hold(self, char: str) -> None:
        self._held += char
        while self._held and not self.OPEN.startswith(self._held):
            self._sink.content(self._held[0])
            self._held = self._held[1:]
        if self._held == self.OPEN:
            self._call = JsonCall(self._sink)

    def _in_call(self, call: JsonCall, char: str) -> None:
        self._held += char
        status = call.feed(char)
        if status is Status.OPEN:
            return
        self._call = None
        self._closing = call.started
        if not call.started:
            self._sink.content(self._held)
        self._held = ""

    def _after_call(self, char: str) -> None:
        """Up to the closing tag; a model that forgets it may open the next call or go on talking."""
        self._held += char
        stripped = self._held.lstrip()
        if stripped == self.CLOSE:
            self._closing, self._held = False, ""
        elif stripped == self.OPEN:
            self._closing, self._held = False, self.OPEN
            self._call = JsonCall(self._sink)
        elif stripped and not self.CLOSE.startswith(stripped) and not self.OPEN.startswith(stripped):
            self._closing, rest, self._held = False, stripped, ""
            for held in rest:
                self._hold(held)


class JsonFormat:
    """Calls as JSON alone: one object, several, or a list of them, behind a marker or as the whole answer.

    Llama 3 (marker <|python_tag|>), Mistral (marker [TOOL_CALLS], also followed by a name and its arguments), and any
    other. `forced`: a grammar made the answer a call, so nothing of it is ever content.
    """

    def __init__(self, sink: Sink, names: Container[str], *, marker: str = "", forced: bool = False) -> None:
        self._sink = sink
        self._names = names
        self._marker = marker
        self._forced = forced
        self._held = ""
        self._state: Callable[[str], None] = self._at_start
        self._call: JsonCall | None = None
        self._name = ""
        self._wrapped = False
        """The call came as name and arguments, and is read as if it were an object."""

    def feed(self, char: str) -> None:
        self._state(char)

    def end(self, *, cut: bool) -> None:
        started = self._call is not None and self._call.started
        if not started and not self._forced and not (cut and self._is_markup()):
            self._sink.content(self._held)

    def _is_markup(self) -> bool:
        """Whether what is held can only be the beginning of a call."""
        if self._sink.num_calls and self._state != self._in_content:
            return True
        text = self._held.strip()
        return bool(self._marker) and (text.startswith(self._marker) or self._marker.startswith(text))

    def _at_start(self, char: str) -> None:
        self._held += char
        text = self._held.lstrip()
        if self._marker and text == self._marker:
            self._state = self._between
        elif text and not (self._marker and self._marker.startswith(text)):
            if text[0] not in "{[":
                self._flush()
                return
            space, self._held, self._state = self._held[: -len(text)], "", self._between
            self._held = space
            for begun in text:
                self._state(begun)

    def _between(self, char: str) -> None:
        """Between calls, and before the first one."""
        self._held += char
        if char == "{":
            self._open_call(char)
        elif char.isspace() or char in "[,;]":
            if self._sink.num_calls:
                self._held = ""
        elif self._marker == "[TOOL_CALLS]" and (char.isalnum() or char == "_"):
            self._name = char
            self._state = self._in_name
        else:
            self._flush()

    def _in_name(self, char: str) -> None:
        """Mistral's newer spelling: name{…} or name[ARGS]{…}."""
        self._held += char
        if self._name == "TOOL_CALLS" and char == "]":  # the marker once more, in front of the next call
            self._state = self._between
            return
        if char != "{":
            self._name += char
            return
        name = self._name.removesuffix("[ARGS]").strip()
        self._call = JsonCall(self._sink, self._names)
        self._state = self._in_call
        for made in f'{{"name":{_quoted(name)},"arguments":{{':
            if self._call.feed(made) is Status.FAILED:
                self._call = None
                self._flush()
                return
        self._wrapped = True

    def _open_call(self, char: str) -> None:
        self._call = JsonCall(self._sink, None if self._forced else self._names)
        self._call.feed(char)
        self._state = self._in_call

    def _in_call(self, char: str) -> None:
        assert self._call is not None
        self._held += char
        status = self._call.feed(char)
        if self._wrapped and status is Status.OPEN and self._call.complete:
            status = self._call.feed("}")
        if status is Status.OPEN:
            return
        started, self._call, self._wrapped = self._call.started, None, False
        if started:
            self._held = ""
            self._state = self._between
        else:
            self._flush()

    def _flush(self) -> None:
        """It was no call: content from here on, up to the marker, if there is one."""
        text, self._held = self._held, ""
        self._state = self._in_content
        for char in text[:1]:
            if not self._forced:
                self._sink.content(char)
        for char in text[1:]:
            self._state(char)

    def _in_content(self, char: str) -> None:
        self._held += char
        while self._held and not (self._marker and self._marker.startswith(self._held)):
            if not self._forced:
                self._sink.content(self._held[0])
            self._held = self._held[1:]
        if self._marker and self._held == self._marker:
            self._state = self._between


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
