"""A model as a pod sees it: its card, and tokenizer and chat template loaded from the registry's blobs.

In: card and blobs. Out: immutable `ServedModel`, safe to use from several threads (encoding changes no state).
Building one parses a file of megabytes: callers do it in a thread and keep the result by content hash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import Tokenizer

from api_service.prepare.renderer import control_token_patterns, template_literal_text
from shared.messages import ModelCard
from shared.text.token_bytes import TokenBytes

__all__ = ["ServedModel", "Vocabulary"]


class Vocabulary:
    """One tokenizer.json: encoder, bytes of each token, and the same encoder without its control tokens."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises ValueError when the file is not a tokenizer that we can decode token by token."""
        self.tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.token_bytes = TokenBytes.from_tokenizer_json(tokenizer_json)
        self.added_tokens_encoder = {
            token.content: token_id for token_id, token in self.tokenizer.get_added_tokens_decoder().items()
        }
        self._special = {token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special}
        self._json = tokenizer_json
        self.longest_token = max(map(len, self.token_bytes.table), default=1) or 1
        """In bytes: a text of b bytes has at least b / longest_token tokens."""

    @cached_property
    def _plain(self) -> Tokenizer:
        """Made at first need: only a text that spells out control tokens asks for it."""
        return Tokenizer.from_str(_without_added_tokens(self._json))

    def control_tokens(self, literal: str) -> tuple[str, ...]:
        """What a user must not be able to write: special tokens, and added tokens that the template itself writes.

        The choice of transformers' `sanitize_control_tokens`; whitespace tokens are ordinary text.
        """
        written = {token for token in self.added_tokens_encoder if token in literal and not token.isspace()}
        return tuple(token for token in self.added_tokens_encoder if token in self._special | written)

    def is_special(self, token: str) -> bool:
        """Whether `skip_special_tokens` leaves it out of a text."""
        return token in self._special

    # The next three make this class the `tokenizer` that transformers' `encode_marked_chat` asks for.

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def convert_tokens_to_ids(self, token: str) -> int | None:
        token_id: int | None = self.tokenizer.token_to_id(token)
        return token_id

    def _encode_without_added_tokens(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids


def _without_added_tokens(tokenizer_json: bytes) -> str:
    document: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    document |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return msgspec.json.encode(document).decode()


@dataclass(frozen=True)
class ServedModel:
    card: ModelCard
    vocabulary: Vocabulary
    template: str
    """Jinja source, "" when the model has none."""
    tool_parser: str = "auto"
    """The format of its tool calls, when the pod's operator says so."""
    foreign_literal: str | None = None
    """Set when the template came with the request: the text that it writes by itself. Such a template must not even be
    compiled in this process."""
    parses_control_tokens: bool = False
    """Whether control tokens that messages spell out are such. Off, they stay text: nobody forges a turn."""

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        pattern: re.Pattern[str] = control_token_patterns(self.vocabulary.control_tokens(self._literal()))[0]
        return pattern

    def _literal(self) -> str:
        if self.foreign_literal is not None:
            return self.foreign_literal
        literal: str = template_literal_text(self.template) if self.template else ""
        return literal

    @property
    def window(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.card.window

    @cached_property
    def bos_token_id(self) -> int | None:
        """Goes in front of plain prompts when the card says so."""
        bos = self.card.special_tokens.get("bos_token", "")
        return self.vocabulary.convert_tokens_to_ids(bos) if self.card.add_bos and bos else None
