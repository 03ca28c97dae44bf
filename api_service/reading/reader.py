"""One choice's text -> pieces: reasoning first, then content and tool calls by the format of its request.

In: text as records bring it. Out: pieces. A pure function of (reading, text, finish reason), and of nothing else.
"""

from __future__ import annotations

from api_service.reading.formats import Format, JsonFormat, NamedFormat, TaggedFormat
from api_service.reading.pieces import Piece, Sink
from api_service.reading.pythonic import PythonicFormat
from shared.messages import Reading
from shared.text.thinking import THINK_CLOSE, THINK_OPEN

__all__ = ["AnswerReader", "call_id", "finish_reason"]


def call_id(rid: str, choice: int, call: int) -> str:
    """The same on every pod and in every attempt to read the stream."""
    return f"call_{rid}_{choice}_{call}"


def finish_reason(reading: Reading, reason: str, num_calls: int) -> str:
    """As OpenAI's API has it: "tool_calls" after calls, but "stop" for a named one; a limit reached always shows."""
    return "tool_calls" if reason == "stop" and num_calls and not reading.named else reason


class AnswerReader:
    def __init__(self, reading: Reading) -> None:
        self._sink = Sink()
        self._format = _format(reading, self._sink)
        self._held = ""
        self._phase = "done" if not reading.think else "inside" if reading.think == "open" else "before"

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def push(self, text: str) -> list[Piece]:
        for char in text:
            if self._phase == "done":
                self._feed(char)
            elif self._phase == "before":
                self._before(char)
            else:
                self._inside(char)
        return self._sink.take()

    def finish(self, reason: str) -> list[Piece]:
        """The last pieces; `reason` is the finish reason."""
        if self._phase == "inside":
            self._sink.reasoning(self._held)
        else:
            for char in self._held:
                self._feed(char)
        self._held = ""
        if self._format is not None:
            self._format.end(cut=reason != "stop")
        self._sink.end()
        return self._sink.take()

    def _feed(self, char: str) -> None:
        if self._format is None:
            self._sink.content(char)
        else:
            self._format.feed(char)

    def _before(self, char: str) -> None:
        self._held += char
        text = self._held.lstrip()
        if text == THINK_OPEN:
            self._phase, self._held = "inside", ""
        elif not THINK_OPEN.startswith(text):
            self._leave(self._held)

    def _inside(self, char: str) -> None:
        self._held += char
        while self._held and not THINK_CLOSE.startswith(self._held):
            self._sink.reasoning(self._held[0])
            self._held = self._held[1:]
        if self._held == THINK_CLOSE:
            self._leave("")

    def _leave(self, text: str) -> None:
        self._phase, self._held = "done", ""
        for char in text:
            self._feed(char)


def _format(reading: Reading, sink: Sink) -> Format | None:
    if reading.named:
        return NamedFormat(sink, reading.named)
    if reading.forced:
        return JsonFormat(sink, reading.names, forced=True)
    if reading.parser == "hermes":
        return TaggedFormat(sink)
    if reading.parser == "pythonic":
        return PythonicFormat(sink, reading.names)
    if reading.parser:
        return JsonFormat(sink, reading.names, marker=MARKERS[reading.parser])
    return None


MARKERS = {"llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "json": ""}
