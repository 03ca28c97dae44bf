"""Records of a log -> the SSE events of a chat or completion stream, from the request's metadata alone.

In: a GenerateRequest and its records in order. Out: bytes. Deterministic, so any pod can go on where another stopped:
events up to `cursor` are computed (they carry state) but not written. What is constant in a stream's chunks is
encoded once.

Cursor: the opening event (roles, or the echoed prompts) is -1, the event of record n is n, the usage event is one
more than the last record. A record with several choices is one event with several `choices`, so that an event is
never half resumed.
"""

from __future__ import annotations

from typing import Any

from api_service.choice_reader import ChoiceReader, choice_readers
from api_service.logprobs import CompletionLogprobs, Speller
from api_service.sse import DONE, error_event, json_bytes
from shared.errors import HeadraceError, RequestCancelled, error_from_code
from shared.messages import Delta, End, GenerateRequest, Record, Usage

__all__ = ["BEFORE_OPENING", "StreamWriter", "public_id", "terminal_error", "usage_object"]

BEFORE_OPENING = -2
"""The cursor of a client that has received nothing."""

_PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-", "embedding": "embd-"}
_SHOWN = ("stop", "length")
"""Finish reasons that a client sees; an abort or an error ends its stream with an error event instead."""


def public_id(request: GenerateRequest) -> str:
    return _PREFIXES[request.kind] + request.rid


def usage_object(usage: Usage, request: GenerateRequest) -> dict[str, Any]:
    """OpenAI's usage; reasoning tokens are told of models that reason."""
    told = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if request.reading is not None and request.reading.think:
        told["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return told


def terminal_error(record: Record) -> HeadraceError | None:
    """What went wrong, from a terminal record; None for a clean end."""
    end = record.end or End()
    if end.code:
        return error_from_code(end.code, end.message)
    if any(delta.finish_reason == "abort" for delta in record.deltas):
        return RequestCancelled("The request was cancelled before it was finished.")
    return None


class StreamWriter:
    """One client's view of one stream."""

    def __init__(self, request: GenerateRequest, speller: Speller | None, cursor: int = BEFORE_OPENING) -> None:
        """`speller` is needed when the request asks for log-probabilities."""
        self._request = request
        self._cursor = cursor
        self._chat = request.kind == "chat"
        self._speller = speller if request.sampling.logprobs is not None else None
        self._arrays: dict[int, CompletionLogprobs] = {}
        self._tokens = 0
        self._reasoning = 0
        self._scores = not self._chat and bool(request.echo) and self._speller is not None
        """Echoed prompts come with their log-probabilities, in the first events of each choice."""
        self._begun: set[int] = set()
        self._readers = choice_readers(request)
        self._early: list[bytes] = []
        self._id = b"id: %b:" % request.rid.encode()
        self._head = b'\ndata: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b,%b"choices":[' % (
            json_bytes(public_id(request)),
            b'"chat.completion.chunk"' if self._chat else b'"text_completion"',
            request.created,
            json_bytes(request.model),
            json_bytes(request.fingerprint or None),
            b'"service_tier":%b,' % json_bytes(request.service_tier) if request.service_tier else b"",
        )
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._open_text = b',"delta":{"content":' if self._chat else b',"text":'
        self._close_text = b"}" if self._chat else b""
        self._plain = not (
            self._speller or self._scores or self._readers or request.return_token_ids or request.continuous_usage
        )
        """Whether a piece of text in the middle of the stream is said in nothing but its choice, number and text."""
        self._before: dict[int, bytes] = {}
        self._after = b'%b,"logprobs":null,"finish_reason":null}%b' % (self._close_text, self._tail)

    def opening(self) -> bytes:
        """The first event: every choice's role, or its prompt when that is echoed; b"" when there is neither."""
        request = self._request
        if self._chat:
            choices = [
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
                for index in range(request.num_choices)
            ]
        else:
            echoes = request.echo and not self._scores
            texts = [request.echo[index // request.n] for index in range(request.num_choices)] if echoes else []
            choices = [self._choice(index, text, b"null", b"null") for index, text in enumerate(texts) if text]
        return self._event(-1, choices, self._prompt_ids() if self._chat else b"") if choices else b""

    def write(self, record: Record) -> bytes:
        """The events of one record, b"" when it brings nothing that a client can see (text held back)."""
        if self._plain and len(record.deltas) == 1 and record.end is None:
            delta = record.deltas[0]
            if delta.finish_reason is None:
                return self._piece(record.seq, delta.index, delta.text)
        choices = [choice for delta in record.deltas if (choice := self._delta(delta))]
        early, self._early = self._early, []
        events = b"".join([self._event(record.seq, [choice], numbered=False) for choice in early])
        events += self._event(record.seq, choices) if choices else b""
        return events + self._ending(record, record.end) if record.end is not None else events

    def _piece(self, position: int, index: int, text: str) -> bytes:
        """The event of almost every token: all but its number and text is the same each time."""
        if not text or position <= self._cursor:
            return b""
        before = self._before.get(index)
        if before is None:
            before = self._before[index] = b'%b{"index":%d%b' % (self._head, index, self._open_text)
        return b"%b%d%b%b%b" % (self._id, position, before, json_bytes(text), self._after)

    def _delta(self, delta: Delta) -> bytes:
        self._tokens += len(delta.token_ids)
        self._reasoning += delta.reasoning
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        scored = self._scores and (first or bool(delta.prompt))
        logprobs = self._logprobs(delta) if self._speller is not None and (delta.logprobs or scored) else b"null"
        text = self._request.echo[delta.index // self._request.n] + delta.text if scored and first else delta.text
        if self._readers:
            return self._read(self._readers[delta.index], delta, logprobs, first)
        if delta.finish_reason in _SHOWN:
            return self._choice(delta.index, text, logprobs, b'"%b"' % delta.finish_reason.encode(), delta, first)
        shown = text or delta.logprobs or scored or (self._request.return_token_ids and delta.token_ids)
        return self._choice(delta.index, text, logprobs, b"null", delta, first) if shown else b""

    def _read(self, reader: ChoiceReader, delta: Delta, logprobs: bytes, first: bool) -> bytes:
        """The choice of a delta whose text has a meaning. A call's first fragment is an event of its own: more of them
        in one record come before the record's event, without an id, so that nobody resumes in between."""
        *bodies, last = reader.deltas(delta)
        self._early += [self._choice(delta.index, body, b"null", b"null") for body in bodies]
        if delta.finish_reason in _SHOWN:
            return self._choice(delta.index, last, logprobs, b'"%b"' % reader.reason.encode(), delta, first)
        shown = last or delta.logprobs or (self._request.return_token_ids and delta.token_ids)
        return self._choice(delta.index, last, logprobs, b"null", delta, first) if shown else b""

    def _choice(
        self,
        index: int,
        text: str | dict[str, Any],
        logprobs: bytes,
        finish: bytes,
        delta: Delta | None = None,
        first: bool = False,
    ) -> bytes:
        if isinstance(text, dict):
            body = b',"delta":%b' % json_bytes(text)
        elif text or not self._chat:
            body = b"%b%b%b" % (self._open_text, json_bytes(text), self._close_text)
        else:
            body = b',"delta":{}'
        more = b""
        if delta is not None and delta.stop_reason is not None:
            more = b',"stop_reason":%b' % json_bytes(delta.stop_reason)
        if delta is not None and self._request.return_token_ids:
            more += b',"token_ids":%b' % json_bytes(delta.token_ids)
            more += self._prompt_ids(index) if first and not self._chat else b""
        return b'{"index":%d%b,"logprobs":%b,"finish_reason":%b%b}' % (index, body, logprobs, finish, more)

    def _prompt_ids(self, index: int = 0) -> bytes:
        """A field of the first event (chat) or of each choice's first one; b"" when nobody asked."""
        request = self._request
        ids = request.prompts[index // request.n]
        return b',"prompt_token_ids":%b' % json_bytes(ids) if request.return_token_ids else b""

    def _logprobs(self, delta: Delta) -> bytes:
        assert self._speller is not None
        if self._chat:
            return json_bytes({"content": self._speller.chat(delta), "refusal": None})
        arrays = self._arrays.get(delta.index)
        if arrays is None:
            arrays = CompletionLogprobs(self._speller, self._request, delta.index)
            self._arrays[delta.index] = arrays
        return json_bytes(arrays.arrays(delta))

    def _event(self, position: int, choices: list[bytes], more: bytes = b"", *, numbered: bool = True) -> bytes:
        if position <= self._cursor:
            return b""
        tail = self._tail
        if self._request.continuous_usage:
            usage = Usage(self._request.prompt_tokens, self._tokens, reasoning_tokens=self._reasoning)
            tail = b'],"usage":%b}\n\n' % json_bytes(usage_object(usage, self._request))
        tail = b"]%b%b" % (more, tail[1:]) if more else tail
        if not numbered:
            return b"%b%b%b" % (self._head[1:], b",".join(choices), tail)
        return b"%b%d%b%b%b" % (self._id, position, self._head, b",".join(choices), tail)

    def _ending(self, record: Record, end: End) -> bytes:
        """Usage and [DONE] after a clean end, else one error event and no [DONE].

        The usage event's id stands behind its data, which SSE allows: litellm takes every line for a chunk, and the
        first line without data after a finish reason for the end of the stream.
        """
        error = terminal_error(record)
        if error is not None:
            return error_event(error.body(), self._request.rid)
        if not self._request.include_usage or record.seq + 1 <= self._cursor:
            return DONE
        usage = json_bytes(usage_object(end.usage, self._request))
        return b'%b],"usage":%b}\n%b%d\n\n%b' % (self._head[1:], usage, self._id, record.seq + 1, DONE)
