"""An acquired request and its choices on the asyncio side: token events in, log records out. No Redis, no threads.

A Job keeps every record of its log until it ends, so whatever Redis lost can be sent again. What it says next is a
function of (request, tokens so far): a take-over replays the logged tokens and goes on in the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine_worker.request import Request, TokenEvent
from engine_worker.wire import float32_bytes, wire_logprobs, wire_score
from shared.claims import Claim, Commit
from shared.grammars.backend import TokenMatcher
from shared.messages import (
    Delta,
    End,
    FinishReason,
    GenerateRequest,
    PromptLogprob,
    Record,
    TokenLogprob,
    Usage,
    encode,
)
from shared.params import choice_seed
from shared.text.choice_text import ChoiceText
from shared.text.token_bytes import TokenBytes

__all__ = ["Choice", "Job"]

_NO_TOKEN_LEFT = "no_token_left"
"""`stop_reason` of an answer that ended because the request's own fields left nothing that could follow."""


class Choice:
    """One answer of a request: its tokens, its text state, and what was not yet put into a record."""

    def __init__(self, request: GenerateRequest, index: int, token_bytes: TokenBytes, engine_id: str) -> None:
        self.index = index
        self.engine_id = engine_id
        self.prompt = request.prompts[index // request.n]
        self.output: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self._conditions = request.stop
        self.num_scored = 0
        """Prompt tokens, from the second on, whose log-probabilities are known."""
        self._scores = request.sampling.prompt_logprobs is not None
        self._text = ChoiceText(
            token_bytes,
            request.stop,
            continues=request.kind == "completion",
            min_tokens=request.sampling.min_tokens,
        )
        self._stop_reason: str | int | None = None
        self._new_ids: list[int] = []
        self._new_text: list[str] = []
        self._new_logprobs: list[TokenLogprob] = []
        self._new_scores: list[PromptLogprob] = []
        self._new_embedding = b""
        self._new_end = False

    def replay(self, delta: Delta) -> None:
        """Takes in what an earlier worker logged; it is not said again."""
        self.output += delta.token_ids
        self.num_scored += len(delta.prompt)
        self.finish_reason = delta.finish_reason
        if self.finish_reason is None:
            for token_id in delta.token_ids:
                self._text.push(token_id)

    def take(self, event: TokenEvent) -> bool:
        """Takes in one event of the engine. True: a stop string ended the choice and the engine must be told."""
        if self.finish_reason is not None:
            return False  # the engine was a step or two ahead of a stop string or a cancellation
        if event.prompt_logprobs:
            self.num_scored += len(event.prompt_logprobs)
            self._new_scores += map(wire_score, event.prompt_logprobs)
        if event.embedding:
            self._new_embedding = float32_bytes(event.embedding)
        stopped = event.token_id is not None and self._take_token(event.token_id, event)
        self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
        if event.exhausted:
            self._stop_reason = _NO_TOKEN_LEFT
        if not stopped and event.finish_reason is not None:
            self.end(event.finish_reason)
        return stopped and event.finish_reason is None

    def end(self, reason: FinishReason) -> None:
        """Ends the choice, with what was held back of its text. An ended choice stays as it is."""
        if self.finish_reason is None:
            self._new_text.append(self._text.finish())
            self._finish(reason)

    @property
    def num_new(self) -> int:
        """Tokens that are in no record yet."""
        return len(self._new_ids)

    @property
    def has_news(self) -> bool:
        return bool(self._new_ids or self._new_scores) or self._new_end

    @property
    def measures(self) -> bool:
        """Whether something of the prompt is still to be computed."""
        return self._scores and self.num_scored < len(self.prompt) - 1

    def pull(self) -> Delta | None:
        """What is new since the last record, or None."""
        if not self.has_news:
            return None
        delta = Delta(
            index=self.index,
            token_ids=tuple(self._new_ids),
            text="".join(self._new_text),
            logprobs=tuple(self._new_logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            prompt=tuple(self._new_scores),
            embedding=self._new_embedding,
        )
        self._new_ids, self._new_text, self._new_logprobs, self._new_scores = [], [], [], []
        self._new_embedding, self._new_end = b"", False
        return delta

    def _take_token(self, token_id: int, event: TokenEvent) -> bool:
        self.output.append(token_id)
        self._new_ids.append(token_id)
        if event.stop_token_id is not None:  # its text is never shown, so its logprobs would belong to nothing
            if event.stop_token_id in self._conditions.stop_token_ids:
                self._stop_reason = event.stop_token_id
            if self._scores and event.logprobs is not None:  # whoever scores a prompt counts on one entry a token
                self._new_logprobs.append(wire_logprobs(token_id, event.logprobs))
            return False
        if event.logprobs is not None:
            self._new_logprobs.append(wire_logprobs(token_id, event.logprobs))
        text, stop = self._text.push(token_id)
        self._new_text.append(text)
        if stop is not None:
            self._stop_reason = stop
            self._finish("stop")
        return stop is not None

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._new_end = True


class Job:
    """One acquired request. The outbox is its only owner; only the asyncio thread touches it."""

    def __init__(self, claim: Claim, request: GenerateRequest, token_bytes: TokenBytes) -> None:
        self.claim = claim
        self.request = request
        self.records: list[bytes] = []
        """All payloads of the log, by seq."""
        self.acked = 0
        """Records before this seq are in the log."""
        self.progressed = False
        """Whether this acquisition has committed anything: a job that has not is a suspect when the engine dies."""
        self.choices = [
            Choice(request, index, token_bytes, f"{claim.rid}/{index}@{claim.epoch}")
            for index in range(request.num_choices)
        ]
        self._error: tuple[str, str] | None = None
        self._sealed_end = False

    def replay(self, payloads: Sequence[bytes], records: Iterable[Record]) -> None:
        """Takes over what an earlier worker logged. Raises ValueError when it does not fit the request."""
        self.records = list(payloads)
        self.acked = len(self.records)
        for record in records:
            for delta in record.deltas:
                if not 0 <= delta.index < len(self.choices):
                    raise ValueError(f"log record {record.seq} names choice {delta.index} of {len(self.choices)}")
                self.choices[delta.index].replay(delta)

    def engine_requests(
        self,
        max_request_tokens: int,
        eos_token_ids: Sequence[int],
        new_matcher: Callable[[], TokenMatcher] | None = None,
    ) -> list[Request]:
        """What the engine has to run: one Request per choice that has not ended.

        `max_request_tokens`: prompt + output of one choice. A choice with nothing left to draw ends here ("length").
        `new_matcher` makes the state of the request's grammar for each choice.
        """
        request = self.request
        stop_ids = frozenset(request.stop.stop_token_ids)
        if new_matcher is not None or not request.stop.ignore_eos:  # a grammar allows EOS only where it is complete
            stop_ids |= frozenset(eos_token_ids)
        runnable = []
        for choice in self.open_choices():
            max_tokens = min(request.stop.max_tokens, max_request_tokens - len(choice.prompt))
            if len(choice.output) >= max_tokens and not (choice.measures or request.pooling):
                choice.end("length")
                continue
            runnable.append(
                Request(
                    request_id=choice.engine_id,
                    prompt_token_ids=list(choice.prompt),
                    sampling=request.sampling,
                    seed=choice_seed(request.sampling.seed, choice.index % request.n),
                    max_tokens=max_tokens,
                    stop_token_ids=stop_ids,
                    matcher=None if new_matcher is None else new_matcher(),
                    output_token_ids=list(choice.output),
                    klass="batch" if request.klass == "batch" else "interactive",
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    num_scored=choice.num_scored,
                    arrival=self.claim.place,
                    pooling=request.pooling,
                )
            )
        return runnable

    def open_choices(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.finish_reason is None]

    def take(self, choice: Choice, event: TokenEvent) -> list[str]:
        """Takes in an event of one of its choices; returns the engine ids that need not run any further."""
        if event.finish_reason == "error":
            choice.take(event)
            return self.fail(event.error_code, event.error_message)
        return [choice.engine_id] if choice.take(event) else []

    def cancel(self) -> list[str]:
        """Ends every open choice with reason "abort"; returns the engine ids to abort."""
        return self._end_all("abort")

    def fail(self, code: str, message: str) -> list[str]:
        """Ends the job with an error for the caller; returns the engine ids to abort."""
        self._error = self._error or (code, message)
        return self._end_all("error")

    def seal(self) -> int:
        """Puts all that is new into one record; the last one carries the end. Returns how many tokens it took."""
        if self._sealed_end:
            return 0
        deltas = tuple(delta for choice in self.choices if (delta := choice.pull()) is not None)
        end = None if self.open_choices() else self._end()
        if deltas or end is not None:
            self.records.append(encode(Record(seq=len(self.records), deltas=deltas, end=end)))
        self._sealed_end = end is not None
        return sum(len(delta.token_ids) for delta in deltas)

    def unsealed_tokens(self) -> int:
        """Tokens that are in no record yet."""
        return sum(choice.num_new for choice in self.choices)

    def has_unsent(self) -> bool:
        """Whether anything is still to be committed."""
        if self._sealed_end or self.acked < len(self.records):
            return self.acked < len(self.records)
        return any(choice.has_news for choice in self.choices) or not self.open_choices()

    def unsent(self, limit: int) -> list[Commit]:
        """The next records to commit, at most `limit`."""
        stop = min(len(self.records), self.acked + limit)
        return [self._commit(seq) for seq in range(self.acked, stop)]

    def usage(self) -> Usage:
        """Each prompt once, completion tokens of all choices, cached tokens of each prompt's first choice."""
        firsts = self.choices[:: self.request.n]
        return Usage(
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=sum(len(choice.output) for choice in self.choices),
            cached_tokens=sum(min(choice.cached_tokens, len(choice.prompt)) for choice in firsts),
        )

    def _end(self) -> End:
        code, message = self._error or ("", "")
        return End(code=code, message=message, usage=self.usage())

    def _end_all(self, reason: FinishReason) -> list[str]:
        still_open = self.open_choices()
        for choice in still_open:
            choice.end(reason)
        return [choice.engine_id for choice in still_open]

    def _commit(self, seq: int) -> Commit:
        end = self._sealed_end and seq == len(self.records) - 1
        usage = self.usage() if end else Usage()
        return Commit(
            claim=self.claim,
            seq=seq,
            payload=self.records[seq],
            end=end,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )
