"""What each token id stands for in bytes, read from a tokenizer.json once per model.

In: the file's bytes. Out: id -> exact bytes, the ids of special tokens, and what happens at the very start of a text.
Covers byte-level BPE and SentencePiece style decoders (Metaspace, Replace, byte fallback); anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

__all__ = ["TokenBytes"]

_Step = Callable[["str | bytes"], "str | bytes"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte (github.com/openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_FOREIGN = chr(0x2400)
"""Has no place in Latin-1, so that encoding fails where it stands."""
_BYTES = str.maketrans(
    {chr(code): _FOREIGN for code in range(256)} | {char: chr(byte) for char, byte in _byte_alphabet().items()}
)
"""Stand-ins to the Latin-1 characters of their bytes; what is none of them becomes, or stays, foreign to Latin-1."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of every token of one tokenizer. Immutable; shared by all requests of a model."""

    table: tuple[bytes, ...]
    """Bytes by id; empty where the vocabulary has a hole."""
    special: frozenset[int]
    """Ids that `skip_special_tokens` leaves out of the text."""
    first: dict[int, bytes]
    """Bytes of tokens that read differently as the first of a text (Metaspace drops its leading space)."""
    strip_char: str = " "
    strip_start: int = 0
    """At most this many `strip_char` are taken from the start of a whole text (Llama 2 style decoders)."""

    @classmethod
    def from_tokenizer_json(cls, data: bytes) -> TokenBytes:
        """Raises ValueError (with the decoder's name) when the file's decoder cannot be run token by token."""
        try:
            document: dict[str, Any] = msgspec.json.decode(data)
            tokens = _vocabulary(document)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a tokenizer.json: {error}") from None
        decoder = _Decoder()
        decoder.read(document.get("decoder"))
        size = max(tokens, default=-1) + 1
        return cls(
            table=tuple(decoder.run(tokens[i]) if i in tokens else b"" for i in range(size)),
            special=frozenset(_special_ids(document, tokens)),
            first=decoder.first_bytes(tokens),
            strip_char=decoder.strip_char,
            strip_start=decoder.strip_start,
        )

    def bytes_of(self, token_id: int) -> bytes:
        """The token's own bytes, special or not; empty for an id the vocabulary does not have."""
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""


def _vocabulary(document: dict[str, Any]) -> dict[int, str]:
    """id -> token string. Added tokens win over the model's vocabulary, as in the tokenizers library."""
    vocab = document["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: [[token, score], …]
        tokens = {i: str(item[0]) for i, item in enumerate(vocab)}
    else:
        tokens = {int(i): token for token, i in vocab.items()}
    return tokens | {int(added["id"]): str(added["content"]) for added in document.get("added_tokens") or ()}


def _special_ids(document: dict[str, Any], tokens: dict[int, str]) -> Iterable[int]:
    """The library tells special tokens by their string, so an ordinary id with the same string counts too."""
    contents = {added["content"] for added in document.get("added_tokens") or () if added["special"]}
    return (i for i, token in tokens.items() if token in contents)


class _Decoder:
    """The decoder section of tokenizer.json as steps on one token, plus its rules for the start of a text."""

    def __init__(self) -> None:
        self.strip_char = " "
        self.strip_start = 0
        self._steps: list[_Step] = []
        self._fused = False
        self._metaspace = ""

    def read(self, spec: dict[str, Any] | None) -> None:
        kind = spec.get("type") if spec else None
        if spec is None or kind not in self._READERS:
            raise ValueError(f"tokenizer.json: decoder {kind!r} is not supported (only {', '.join(self._READERS)})")
        self._READERS[kind](self, spec)

    def run(self, token: str) -> bytes:
        piece: str | bytes = token
        for step in self._steps:
            piece = step(piece)
        return piece if isinstance(piece, bytes) else piece.encode()

    def first_bytes(self, tokens: dict[int, str]) -> dict[int, bytes]:
        mark = self._metaspace
        return {i: self.run(t.replace(mark, "")) for i, t in tokens.items() if mark and mark in t}

    def _read_sequence(self, spec: dict[str, Any]) -> None:
        for part in spec["decoders"]:
            self.read(part)

    def _read_replace(self, spec: dict[str, Any]) -> None:
        pattern, content = spec["pattern"].get("String"), spec["content"]
        if pattern is None or self._fused:
            raise ValueError("tokenizer.json: a Replace decoder with a pattern, or after Fuse, is not supported")
        self._steps.append(lambda piece: piece.replace(pattern, content) if isinstance(piece, str) else piece)

    def _read_byte_fallback(self, _spec: dict[str, Any]) -> None:
        self._steps.append(_byte_fallback)

    def _read_byte_level(self, _spec: dict[str, Any]) -> None:
        self._steps.append(_byte_level)

    def _read_metaspace(self, spec: dict[str, Any]) -> None:
        mark = spec["replacement"]
        scheme = spec.get("prepend_scheme") or ("always" if spec.get("add_prefix_space", True) else "never")
        self._metaspace = "" if scheme == "never" else mark
        self._steps.append(lambda piece: piece.replace(mark, " ") if isinstance(piece, str) else piece)

    def _read_fuse(self, _spec: dict[str, Any]) -> None:
        self._fused = True

    def _read_strip(self, spec: dict[str, Any]) -> None:
        if not self._fused or spec["stop"]:
            raise ValueError("tokenizer.json: a Strip decoder before Fuse, or at the end of a text, is not supported")
        self.strip_char, self.strip_start = spec["content"], spec["start"]

    _READERS: ClassVar[dict[str, Callable[[_Decoder, dict[str, Any]], None]]] = {
        "ByteFallback": _read_byte_fallback,
        "ByteLevel": _read_byte_level,
        "Fuse": _read_fuse,
        "Metaspace": _read_metaspace,
        "Replace": _read_replace,
        "Sequence": _read_sequence,
        "Strip": _read_strip,
    }


def _byte_level(piece: str | bytes) -> bytes:
    """A token with a character outside the alphabet (an added token) stands for itself."""
    if isinstance(piece, bytes):
        return piece
    try:
        return piece.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def _byte_fallback(piece: str | bytes) -> str | bytes:
    """`<0x0A>` is the byte 10."""
    if isinstance(piece, str) and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes.fromhex(piece[3:5])
        except ValueError:
            return piece
    return piece
