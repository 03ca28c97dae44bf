"""Log-probabilities in OpenAI's two shapes, with the exact bytes of every token.

In: TokenLogprobs of the log and the model's token bytes. Out: JSON-ready objects. A token that is no part of the text
(the one that ended the choice, or a special one that is skipped) has no bytes, so that joining the bytes always gives
the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from shared.messages import Delta, GenerateRequest, PromptLogprob, TokenLogprob
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

    def prompt_parts(self, ids: Sequence[int], text: str) -> list[bytes]:
        """What each prompt token adds to the echoed text; a BOS put in front of the caller's text adds nothing."""
        parts = list(map(self._bytes_of, ids))
        if b"".join(parts[1:]) == text.encode() and parts[0]:
            parts[0] = b""
        return parts

    def prompt_logprobs(
        self, ids: Sequence[int], scores: Sequence[PromptLogprob], alternatives: int
    ) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: null for the first token, then {id: {logprob, rank, decoded_token}}, the best ones
        and the token itself."""
        entries: list[dict[str, Any] | None] = [None] if ids else []
        for score in scores:
            ranked = [(i + 1, token_id, value) for i, (token_id, value) in enumerate(score.top[:alternatives])]
            entries.append(
                {
                    str(token_id): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": self._bytes_of(token_id).decode(errors="replace"),
                    }
                    for rank, token_id, value in (*ranked, (score.rank, score.token_id, score.logprob))
                }
            )
        return entries

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

    def __init__(self, speller: Speller, request: GenerateRequest, index: int) -> None:
        """Of choice `index` of a completion that asks for log-probabilities; with those of its prompt when echoed."""
        self._speller = speller
        self._alternatives = request.sampling.logprobs or 0
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._prompt: list[bytes] = []
        if request.echo and request.sampling.prompt_logprobs is not None:
            position = index // request.n
            self._prompt = speller.prompt_parts(request.prompts[position], request.echo[position])
        self._next = 0
        """How many tokens of the prompt have been told."""

    @property
    def begins(self) -> bool:
        """Whether the prompt's first token, which has no log-probability, is still to be told."""
        return bool(self._prompt) and self._next == 0

    def arrays(self, delta: Delta) -> dict[str, Any]:
        """tokens, token_logprobs, top_logprobs (null when none were asked for) and text_offset of one delta."""
        items: list[TokenLogprob | PromptLogprob | None] = [*delta.prompt, *delta.logprobs]
        scored = len(delta.prompt) if self._prompt else 0
        if not self._prompt:
            items = [*delta.logprobs]
        elif self._next == 0:
            items, scored = [None, *items], scored + 1
        parts = [*self._prompt[self._next : self._next + scored], *self._speller.in_text(delta)]
        self._next += scored
        offsets = []
        for i, part in enumerate(parts):
            if i == scored and self._next == len(
                self._prompt
            ):  # echoed text is whole: half a character is shown as one
                self._offset += len(self._decoder.decode(b"", final=True))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(part))
        return {
            "tokens": list(map(legacy_text, parts)),
            "token_logprobs": [item.logprob if item else None for item in items],
            "top_logprobs": [self._top(item) if item else None for item in items] if self._alternatives else None,
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob | PromptLogprob) -> dict[str, float]:
        """The best ones, and the chosen one when it is not among them."""
        names, chosen = self._speller.legacy_name, (item.token_id, item.logprob)
        best = item.top[: self._alternatives]
        return {names(token_id): logprob for token_id, logprob in (*best, chosen)}
