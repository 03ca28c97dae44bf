"""Records of a log -> one JSON answer, for requests that are not streamed.

In: a GenerateRequest and its records in order. Out: the bytes of a chat.completion or text_completion. The same rules
as chunks.py, so that joined chunks equal the answer.
"""

from __future__ import annotations

from typing import Any

from api_service.choice_reader import choice_readers
from api_service.chunks import public_id, terminal_error, usage_object
from api_service.logprobs import CompletionLogprobs, Speller
from api_service.sse import json_bytes
from shared.errors import HeadraceError
from shared.messages import Delta, GenerateRequest, PromptLogprob, Record, Usage

__all__ = ["Answer"]

_ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class _Choice:
    """What one choice has so far."""

    def __init__(self, text: str, arrays: CompletionLogprobs | None) -> None:
        self.texts = [text]
        self.content: list[dict[str, Any]] = []
        self.legacy: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": None, "text_offset": []}
        self.arrays = arrays
        self.scores: list[PromptLogprob] = []
        self.token_ids: list[int] = []
        self.end: Delta | None = None

    def add_legacy(self, arrays: dict[str, Any]) -> None:
        for key in _ARRAYS:
            if arrays[key] is not None:
                self.legacy[key] = [*(self.legacy[key] or []), *arrays[key]]


class Answer:
    """Folds records until the terminal one; then either `error` or `body()` is the answer."""

    def __init__(self, request: GenerateRequest, speller: Speller | None) -> None:
        self._request = request
        self._names = speller
        self._speller = speller if request.sampling.logprobs is not None else None
        self._usage = Usage()
        self.error: HeadraceError | None = None
        self._readers = choice_readers(request)
        echo = request.echo
        self._choices = [
            _Choice(echo[index // request.n] if echo else "", self._new_arrays(index))
            for index in range(request.num_choices)
        ]

    def _new_arrays(self, index: int) -> CompletionLogprobs | None:
        if self._speller is None or self._request.kind == "chat":
            return None
        return CompletionLogprobs(self._speller, self._request, index)

    def add(self, record: Record) -> None:
        for delta in record.deltas:
            choice = self._choices[delta.index]
            choice.texts.append(delta.text)
            if self._readers:
                self._readers[delta.index].take(delta)
            choice.scores += delta.prompt
            choice.token_ids += delta.token_ids
            if choice.arrays is not None:
                if delta.logprobs or delta.prompt or choice.arrays.begins:
                    choice.add_legacy(choice.arrays.arrays(delta))
            elif self._speller is not None and delta.logprobs:
                choice.content += self._speller.chat(delta)
            if delta.finish_reason is not None:
                choice.end = delta
        if record.end is not None:
            self._usage = record.end.usage
            self.error = terminal_error(record)

    def body(self) -> bytes:
        """The JSON of the whole answer; only after a terminal record without error."""
        request = self._request
        chat = request.kind == "chat"
        return json_bytes(
            {
                "id": public_id(request),
                "object": "chat.completion" if chat else "text_completion",
                "created": request.created,
                "model": request.model,
                "system_fingerprint": request.fingerprint or None,
                **({"service_tier": request.service_tier} if request.service_tier else {}),
                "choices": [self._choice(i, choice, chat) for i, choice in enumerate(self._choices)],
                "usage": usage_object(self._usage, request),
                **(self._of_prompt(0) if chat else {}),
            }
        )

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """What is to be told of a choice's prompt: beside the choices of a chat, in each choice of a completion."""
        request, choice = self._request, self._choices[index]
        ids = request.prompts[index // request.n]
        told: dict[str, Any] = {"prompt_token_ids": ids} if request.return_token_ids else {}
        if request.prompt_logprobs is not None and self._names is not None:
            told["prompt_logprobs"] = self._names.prompt_logprobs(ids, choice.scores, request.prompt_logprobs)
        return told

    def _choice(self, index: int, choice: _Choice, chat: bool) -> dict[str, Any]:
        text = "".join(choice.texts)
        end = choice.end or Delta()
        head: dict[str, Any] = {"index": index}
        if chat:
            head["message"] = {"role": "assistant", "content": text, "refusal": None}
            if self._readers:
                head["message"] |= self._readers[index].message()
            logprobs: Any = {"content": choice.content, "refusal": None}
        else:
            head["text"] = text
            logprobs = choice.legacy
        head["logprobs"] = logprobs if self._speller is not None else None
        head["finish_reason"] = self._readers[index].reason if self._readers else end.finish_reason
        if end.stop_reason is not None:
            head["stop_reason"] = end.stop_reason
        if self._request.return_token_ids:
            head["token_ids"] = choice.token_ids
        if not chat:
            head |= self._of_prompt(index)
        return head
