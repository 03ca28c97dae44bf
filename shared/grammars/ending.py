"""What brings a JSON output to its end: numbers of bounded length, and the shortest way out when few tokens are left.

In: the output's bytes, which tokens the grammar allows. Out: fewer allowed tokens, never none. A schema bounds neither
a number's digits nor a text's length, so a small model may go on until its tokens are used up, and a truncated document
is of no use. A function of the output and its limit alone, so a take-over narrows alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_DIGITS", "JsonEnding", "JsonVocabulary", "reserved_tokens"]

MAX_DIGITS = {"whole": 20, "fraction": 17, "exponent": 3}
"""Digits of a number's parts: all of an unsigned 64-bit integer, all that a float64 tells apart. One token may pass the
bound, and where the schema leaves nothing but digits, they go on."""
_RESERVED_PART, _RESERVED_MOST = 4, 256

_Mask = NDArray[np.bool_]


def reserved_tokens(max_tokens: int) -> int:
    """Of an output of so many tokens at most, the last so many serve to end it, and one more for each open bracket."""
    return min(max_tokens // _RESERVED_PART, _RESERVED_MOST)


@dataclass(frozen=True, slots=True)
class JsonVocabulary:
    """Tokens by what they do to a JSON text: bool [vocab_size] each. Made once a tokenizer."""

    pieces: tuple[bytes, ...]
    digits: _Mask
    """Begin with a digit."""
    out_of_text: tuple[_Mask, ...]
    """Ways out of a string, the shortest first."""
    out_of_value: tuple[_Mask, ...]
    """Ways on outside of strings: the end, what closes only, what closes and goes on, the next item, all but space and
    what opens more."""

    @classmethod
    def of(cls, pieces: tuple[bytes, ...], end_ids: Iterable[int]) -> JsonVocabulary:
        """`pieces`: the tokens' bytes, by id; `end_ids`: the tokens after which nothing comes."""

        def where(holds: Callable[[bytes], bool]) -> _Mask:
            return np.fromiter((bool(piece) and holds(piece) for piece in pieces), dtype=np.bool_, count=len(pieces))

        ends = np.zeros(len(pieces), dtype=np.bool_)
        ends[list(end_ids)] = True
        closing = where(lambda piece: not piece.strip(b"}]"))
        begins_closed = where(lambda piece: piece[:1] in (b"}", b"]"))
        goes_on = where(lambda piece: piece[:1] == b",")
        plain = where(lambda piece: piece[:1] not in (b" ", b"\n", b"\t", b"\r", b"[", b"{"))
        quote = where(lambda piece: piece[:1] == b'"' and not piece[1:].strip(b"}]"))
        begins_quoted = where(lambda piece: piece[:1] == b'"')
        return cls(
            pieces=pieces,
            digits=where(lambda piece: piece[:1].isdigit()),
            out_of_text=(quote, begins_quoted),
            out_of_value=(ends, closing, begins_closed, goes_on, plain),
        )


class JsonEnding:
    """Follows one output. `narrow` may be called any number of times between two calls of `follow`."""

    def __init__(self, vocabulary: JsonVocabulary, max_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._left = max_tokens
        self._reserved = reserved_tokens(max_tokens)
        self._in_text = False
        self._escaped = False
        self._part = "whole"
        self._digits = 0
        self._depth = 0
        """Arrays and objects that are open."""

    def follow(self, tokens: Iterable[int]) -> None:
        """Takes in the next tokens of the output."""
        pieces = self._vocabulary.pieces
        for token in tokens:
            self._left -= 1
            for byte in pieces[token] if token < len(pieces) else b"":
                (self._text_byte if self._in_text else self._value_byte)(byte)

    def narrow(self, allowed: _Mask) -> None:
        """allowed bool [vocab_size], changed in place: fewer of the same, at least one where there was one."""
        vocabulary = self._vocabulary
        if not self._in_text and self._digits >= MAX_DIGITS[self._part]:
            _keep(allowed, ~vocabulary.digits)
        if self._left <= self._reserved + self._depth:
            for way in vocabulary.out_of_text if self._in_text else vocabulary.out_of_value:
                if _keep(allowed, way):
                    return

    def _text_byte(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == ord("\\"):
            self._escaped = True
        elif byte == ord('"'):
            self._in_text = False

    def _value_byte(self, byte: int) -> None:
        if ord("0") <= byte <= ord("9"):
            self._digits += 1
            return
        self._digits = 0
        if byte == ord("."):
            self._part = "fraction"
        elif byte in b"eE":
            self._part = "exponent"
        elif byte not in b"+-":
            self._part = "whole"
            self._in_text = byte == ord('"')
            self._depth += (byte in b"[{") - (byte in b"]}")


def _keep(allowed: _Mask, wanted: _Mask) -> bool:
    """Leaves only the wanted ones, unless that would be none."""
    kept = allowed & wanted
    if not kept.any():
        return False
    allowed[:] = kept
    return True
