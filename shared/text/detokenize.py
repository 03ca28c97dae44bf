"""Token ids in, text out, piece by piece; the pieces joined are what decoding all ids at once gives.

Keeps at most the three bytes of one unfinished character, so nothing waits longer than a character needs and nothing
handed out is ever taken back. The state is a function of the ids alone: a take-over pushes the logged ids again.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from shared.text.token_bytes import TokenBytes

__all__ = ["Detokenizer"]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoding of one sequence of output ids.

    Invalid UTF-8 becomes U+FFFD by Unicode's rule of maximal subparts, as in the tokenizers library for byte-level
    models. Its byte fallback instead spoils a whole run of byte tokens, valid characters included, which no stream can
    do after the fact: here only the broken part is replaced.

    `continues`: the text goes on after a prompt (plain completions), so the first token keeps its leading space.
    """

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool = True, *, continues: bool = False) -> None:
        self._tokens = token_bytes
        self._skip = token_bytes.special if skip_special_tokens else frozenset[int]()
        self._utf8 = _Utf8Decoder(errors="replace")
        self._at_first = not continues
        self._to_strip = 0 if continues else token_bytes.strip_start

    @property
    def pending(self) -> bytes:
        """Bytes of the unfinished character, at most three."""
        return self._utf8.getstate()[0]

    def push(self, ids: Iterable[int]) -> str:
        """The text these ids complete; "" while a character is unfinished."""
        return self._start(self._utf8.decode(b"".join(self._bytes(i) for i in ids if i not in self._skip)))

    def push_one(self, token_id: int) -> str:
        """The same for one id."""
        text = self._utf8.decode(b"" if token_id in self._skip else self._bytes(token_id))
        return self._start(text) if self._to_strip else text

    def flush(self) -> str:
        """The end of the text: an unfinished character becomes exactly one U+FFFD."""
        return self._start(self._utf8.decode(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        data = self._tokens.bytes_of(token_id)
        if self._at_first and 0 <= token_id < len(self._tokens.table):
            self._at_first = False
            return self._tokens.first.get(token_id, data)
        return data

    def _start(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._tokens.strip_char:
                self._to_strip = 0
            else:
                self._to_strip -= 1
                text = text[1:]
        return text
