"""Log-probabilities in OpenAI's two shapes, with the exact bytes of every token.

In: TokenLogprobs of the log and the model's token bytes. Out: JSON-ready objects. A token that is no part of the text
(the one that ended the choice, or a special one that is skipped) has no bytes, so that joining the bytes always gives
the text.
"""

from __future__ import annotations

import codecs
from typing import Any

from shared.messages import Delta, TokenLogprob
from shared.text.token_bytes import TokenBytes

__all__ = ["CompletionLogprobs", "Speller"]


class Speller:
    """Spells tokens of one model for one request."""

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool) -> None:
        self._bytes_of = token_bytes.bytes_of
        self._skipped = token_bytes.special if skip_special_tokens else frozenset()

    def in_text(self, delta: Delta) -> list[bytes]:
        """What each token of a delta adds to the text, before stop strings are cut."""
        parts = [b"" if item.token_id in self._skipped else self._bytes_of(item.token_id) for item in delta.logprobs]
        ended_by_token = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
        if ended_by_token and parts and len(parts) == len(delta.token_ids):  # else the worker left the stop token out
            parts[-1] = b""  # a stop token's own text is never part of the answer
        return parts

    def chat(self, delta: Delta) -> list[dict[str, Any]]:
        """Items of `logprobs.content`."""
        return [
            {**self._entry(item.token_id, item.logprob, part), "top_logprobs": self._alternatives(item)}
            for item, part in zip(delta.logprobs, self.in_text(delta), strict=True)
        ]

    def legacy_name(self, token_id: int) -> str:
        """The text endpoint's name of a token: its text, or "bytes:\\xf0\\x9f" (as OpenAI) for part of a character."""
        return legacy_text(self._bytes_of(token_id))

    def _alternatives(self, item: TokenLogprob) -> list[dict[str, Any]]:
        return [self._entry(token_id, logprob, self._bytes_of(token_id)) for token_id, logprob in item.top]

    def _entry(self, token_id: int, logprob: float, part: bytes) -> dict[str, Any]:
        return {"token": self._bytes_of(token_id).decode(errors="replace"), "logprob": logprob, "bytes": list(part)}


def legacy_text(part: bytes) -> str:
    try:
        return part.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in part)


class CompletionLogprobs:
    """The text endpoint's arrays of one choice. Remembers how much text the choice has, for `text_offset`."""

    def __init__(self, speller: Speller, alternatives: int, offset: int = 0) -> None:
        self._speller = speller
        self._alternatives = alternatives
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def arrays(self, delta: Delta) -> dict[str, Any]:
        """tokens, token_logprobs, top_logprobs (null when none were asked for) and text_offset of one delta."""
        parts = self._speller.in_text(delta)
        offsets = []
        for part in parts:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(part))
        top = [self._top(item) for item in delta.logprobs] if self._alternatives else None
        return {
            "tokens": list(map(legacy_text, parts)),
            "token_logprobs": [item.logprob for item in delta.logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """The best ones, and the chosen one when it is not among them."""
        chosen = (item.token_id, item.logprob)
        return {self._speller.legacy_name(token_id): logprob for token_id, logprob in (*item.top, chosen)}
