"""What a reader says of an answer, piece by piece, and the list it says it into."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CallArguments", "CallStart", "Content", "Piece", "Reasoning", "Sink"]


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `index` counts the calls of one choice."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the arguments of call `index`, as JSON text."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Sink:
    """Collects pieces, neighbours of one kind joined. White space around calls is no content."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._pieces: list[tuple[type[Piece], int, str]] = []
        self._space = ""
        self._has_content = False

    def content(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._space += char
                continue
            self._add(Content, 0, self._space + char if self._has_content or not self.num_calls else char)
            self._space = ""
            self._has_content = True

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, 0, text)

    def start(self, name: str) -> None:
        self._space = ""
        self._pieces.append((CallStart, self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that began last."""
        self._add(CallArguments, self.num_calls - 1, text)

    def end(self) -> None:
        """Nothing follows: white space that might have come before a call was content after all."""
        if self._space and not self.num_calls:
            self._add(Content, 0, self._space)
        self._space = ""

    def take(self) -> list[Piece]:
        """What is new since the last call."""
        pieces: list[Piece] = [
            kind(index, text) if kind is CallStart or kind is CallArguments else kind(text)  # type: ignore[call-arg, arg-type]
            for kind, index, text in self._pieces
        ]
        self._pieces = []
        return pieces

    def _add(self, kind: type[Piece], index: int, text: str) -> None:
        if self._pieces and self._pieces[-1][:2] == (kind, index) and kind is not CallStart:
            text = self._pieces.pop()[2] + text
        if text:
            self._pieces.append((kind, index, text))
