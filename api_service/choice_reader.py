"""Pieces of a choice's text as OpenAI's objects: deltas of a stream, or the fields of a whole message.

In: a request with a `reading`, and the deltas of its log. Out: dicts. The one code for both ways to answer, so that
joined deltas are the message.
"""

from __future__ import annotations

from typing import Any

from api_service.reading.pieces import CallArguments, CallStart, Content, Piece
from api_service.reading.reader import AnswerReader, call_id, finish_reason
from shared.messages import Delta, GenerateRequest, Reading

__all__ = ["ChoiceReader", "choice_readers"]


def choice_readers(request: GenerateRequest) -> list[ChoiceReader]:
    """One a choice; none when the text is the content."""
    reading = request.reading
    if reading is None:
        return []
    return [ChoiceReader(reading, request.rid, index) for index in range(request.num_choices)]


class ChoiceReader:
    def __init__(self, reading: Reading, rid: str, index: int) -> None:
        self._reading = reading
        self._rid = rid
        self._index = index
        self._reader = AnswerReader(reading)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.reason = ""
        """The finish reason, once there is one."""

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """What a client is told of it: at least one object, maybe empty; each call's first fragment ends one."""
        objects: list[dict[str, Any]] = [{}]
        for piece in self._pieces(delta):
            self._say(piece, objects[-1])
            if isinstance(piece, CallStart):
                objects.append({})
        return objects if objects[-1] or len(objects) == 1 or self.reason else objects[:-1]

    def take(self, delta: Delta) -> None:
        """Keeps what a delta brought for `message`."""
        for piece in self._pieces(delta):
            if isinstance(piece, CallStart):
                self._calls.append(self._call(piece))
            elif isinstance(piece, CallArguments):
                self._calls[piece.index]["function"]["arguments"] += piece.text
            else:
                (self._content if isinstance(piece, Content) else self._reasoning).append(piece.text)

    def message(self) -> dict[str, Any]:
        """Fields of the assistant's message; content is null when there are calls only."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        fields: dict[str, Any] = {"content": content or (None if self._calls else "")}
        if self._reading.think:
            fields |= {"reasoning": reasoning or None, "reasoning_content": reasoning or None}
        return fields | ({"tool_calls": self._calls} if self._calls else {})

    def _pieces(self, delta: Delta) -> list[Piece]:
        pieces = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish(delta.finish_reason)
            self.reason = finish_reason(self._reading, delta.finish_reason, self._reader.num_calls)
        return pieces

    def _say(self, piece: Piece, target: dict[str, Any]) -> None:
        if isinstance(piece, CallStart):
            target.setdefault("tool_calls", []).append({"index": piece.index, **self._call(piece)})
        elif isinstance(piece, CallArguments):
            entry = {"index": piece.index, "function": {"arguments": piece.text}}
            target.setdefault("tool_calls", []).append(entry)
        else:
            keys = ("content",) if isinstance(piece, Content) else ("reasoning", "reasoning_content")
            for key in keys:
                target[key] = target.get(key, "") + piece.text

    def _call(self, piece: CallStart) -> dict[str, Any]:
        made = call_id(self._rid, self._index, piece.index)
        return {"id": made, "type": "function", "function": {"name": piece.name, "arguments": ""}}
