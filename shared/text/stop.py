"""Finds stop strings in a text that arrives in pieces of any size, and holds back only what may still become one.

In: pieces of text. Out: what may be shown, and the stop that ended it. The result does not depend on where the pieces
are cut: each stop is followed by its own Knuth-Morris-Pratt automaton, one character at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


def _failure(stop: str) -> list[int]:
    """KMP failure function: entry i = longest proper prefix of `stop` that ends stop[: i + 1]."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table


class StopMatcher:
    """The match that is complete first wins; of those complete at the same character, the one that begins first.

    `include` keeps the stop itself in the text. Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._failures = [_failure(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string now complete or None). Nothing may be pushed after a match."""
        if not self._stops:
            return text, None
        text = self._held + text
        for position in range(len(self._held), len(text)):
            stop = self._advance(text[position])
            if stop is not None:
                self._held = ""
                return text[: position + 1 if self._include else position + 1 - len(stop)], stop
        shown = len(text) - max(self._matched)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """The choice ended for another reason: what was held back belongs to the text."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Feeds one character to all automata; the longest stop it completes, if any."""
        complete = None
        for i, stop in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = self._failures[i][length - 1]
            length += stop[length] == char
            self._matched[i] = length
            if length == len(stop) and complete is None:
                complete = stop
        return complete
