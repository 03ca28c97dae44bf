"""An acquired request and its choices on the asyncio side: token events in, log records out. No Redis, no threads.

A Job keeps every record of its log until it ends, so whatever Redis lost can be sent again. What it says next is a
function of (request, tokens so far): a take-over replays the logged tokens and goes on in the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine_worker.choice import Choice
from engine_worker.request import Request, TokenEvent
from shared.claims import Claim, Commit
from shared.grammars.backend import TokenMatcher
from shared.messages import End, FinishReason, GenerateRequest, Record, Usage, encode
from shared.params import choice_seed
from shared.text.token_bytes import TokenBytes

__all__ = ["Job"]


class Job:
    """One acquired request. The outbox is its only owner; only the asyncio thread touches it."""

    def __init__(
        self, claim: Claim, request: GenerateRequest, token_bytes: TokenBytes, *, yields: bool = False
    ) -> None:
        """`yields`: its sequences give their seats to others, as those of batch work always do."""
        self.claim = claim
        self.request = request
        self.yields = yields or request.klass == "batch"
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
        new_matcher: Callable[[int], TokenMatcher] | None = None,
    ) -> list[Request]:
        """What the engine has to run: one Request per choice that has not ended.

        `max_request_tokens`: prompt + output of one choice. A choice with nothing left to draw ends here ("length").
        `new_matcher` makes the state of the request's grammar for each choice, given how many tokens it may have.
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
                    matcher=None if new_matcher is None else new_matcher(max_tokens),
                    output_token_ids=list(choice.output),
                    klass="batch" if self.yields else "interactive",
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
        deltas, taken, goes_on = [], 0, False
        for choice in self.choices:
            taken += choice.num_new
            if (delta := choice.pull()) is not None:
                deltas.append(delta)
            goes_on = goes_on or choice.finish_reason is None
        end = None if goes_on else self._end()
        if deltas or end is not None:
            self.records.append(encode(Record(len(self.records), tuple(deltas), end)))
        self._sealed_end = end is not None
        return taken

    def unsealed_tokens(self) -> int:
        """Tokens that are in no record yet."""
        return sum(choice.num_new for choice in self.choices)

    @property
    def sealed(self) -> bool:
        """Whether its last record is made; Redis may have it already."""
        return self._sealed_end

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
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
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
        if not self._sealed_end or seq < len(self.records) - 1:
            return Commit(self.claim, seq, self.records[seq])
        usage = self.usage()
        return Commit(
            claim=self.claim,
            seq=seq,
            payload=self.records[seq],
            end=True,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
