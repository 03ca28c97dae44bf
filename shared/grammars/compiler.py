"""Grammars for one tokenizer, as workers run them: a spec in, token matchers out, compiled once a spec.

Blocking, thread-safe; a compilation takes from half a millisecond to some ten, without the interpreter's lock. Pods
have refused by then what could take longer (checker.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

from tokenizers import Tokenizer

from shared.grammars.backend import GrammarError, TokenMatcher, first_line, grammar_text, limits, llguidance
from shared.grammars.ending import JsonEnding, JsonVocabulary
from shared.params import GrammarSpec
from shared.text.token_bytes import TokenBytes

__all__ = ["GrammarCompiler"]

_KEPT = 128
"""Compiled grammars kept, the latest used."""


class GrammarCompiler:
    """Grammars of one model. Raises ValueError when there can be none: no library, or no end token."""

    def __init__(
        self, tokenizer_json: bytes, token_bytes: TokenBytes, eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        if llguidance is None:
            raise ValueError("the package llguidance is not installed")
        if not eos_token_ids:
            raise ValueError("the model has no end token")
        self._source = (tokenizer_json, token_bytes, tuple(eos_token_ids), vocab_size)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._json: JsonVocabulary | None = None
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, spec: GrammarSpec, max_tokens: int) -> TokenMatcher:
        """A matcher at the start of the grammar, of the caller's own, for an output of so many tokens at most.

        Raises GrammarError.
        """
        with self._lock:
            root = self._compiled.get(spec)
            if root is not None:
                self._compiled.move_to_end(spec)
        if root is None:
            root = self._compile(spec)
        ending = JsonEnding(self._known_json(), max_tokens) if spec.kind == "json_schema" else None
        return TokenMatcher(root.deep_copy(), ending)

    def _compile(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        root = llguidance.LLMatcher(self._known_tokenizer(), grammar_text(spec), log_level=0, limits=limits())
        if root.is_error():
            raise GrammarError(first_line(root.get_error()))
        with self._lock:
            self._compiled[spec] = root
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return root

    def _known_json(self) -> JsonVocabulary:
        with self._making:
            if self._json is None:
                _, token_bytes, eos, vocab_size = self._source
                self._json = JsonVocabulary.of(_pieces(token_bytes, vocab_size), eos)
            return self._json

    def _known_tokenizer(self) -> llguidance.LLTokenizer:
        """Made for the first grammar: it takes a quarter of a second, which no start should wait for."""
        with self._making:
            if self._tokenizer is None:
                tokenizer_json, token_bytes, eos, vocab_size = self._source
                wrapper = _Vocabulary(tokenizer_json, token_bytes, eos[0], vocab_size)
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        cast("Any", wrapper), n_vocab=vocab_size, eos_token=list(eos)
                    )
                except ValueError as error:
                    raise GrammarError(f"this model's tokenizer has no grammars: {first_line(str(error))}") from error
            return self._tokenizer


def _pieces(token_bytes: TokenBytes, vocab_size: int) -> tuple[bytes, ...]:
    """The bytes of each id below `vocab_size`; of what the tokenizer does not know, none."""
    table = token_bytes.table[:vocab_size]
    return (*table, *[b""] * (vocab_size - len(table)))


class _Vocabulary:
    """The vocabulary as llguidance wants it: bytes by id, and a text's usual tokens (what the grammar forces is written
    with them, as the model would)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer_json: bytes, token_bytes: TokenBytes, eos_token_id: int, vocab_size: int) -> None:
        self.eos_token_id = eos_token_id
        table = token_bytes.table[:vocab_size]
        self.tokens = list(_pieces(token_bytes, vocab_size))
        self.special_token_ids = sorted(i for i in token_bytes.special if i < vocab_size)
        self._table = token_bytes
        self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        ordinary = [(i, piece) for i, piece in enumerate(table) if piece and i not in token_bytes.special]
        self._by_bytes = {piece: i for i, piece in reversed(ordinary)}
        self._longest = max(map(len, table), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ordinary tokens whose bytes are exactly the text's; greedy where the tokenizer has other ideas."""
        wanted = text.encode() if isinstance(text, str) else text
        try:
            ids: list[int] = self._tokenizer.encode(wanted.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            ids = []
        exact = b"".join(map(self._table.bytes_of, ids)) == wanted and self._table.special.isdisjoint(ids)
        return ids if exact else self._greedy(wanted)

    def _greedy(self, wanted: bytes) -> list[int]:
        """Longest match; a byte without a token ends it, and llguidance goes on by itself."""
        ids: list[int] = []
        start = 0
        while start < len(wanted):
            for length in range(min(self._longest, len(wanted) - start), 0, -1):
                found = self._by_bytes.get(wanted[start : start + length])
                if found is not None:
                    ids.append(found)
                    start += length
                    break
            else:
                break
        return ids
