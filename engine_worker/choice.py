"""One answer of a request on the asyncio side: its tokens, its text state, and what was not yet put into a record.

In: token events of the engine, or what an earlier worker logged. Out: deltas. What it says next is a function of the
request and its tokens so far. Owned by its Job.
"""

from __future__ import annotations

from engine_worker.request import TokenEvent
from engine_worker.wire import float32_bytes, wire_logprobs, wire_score
from shared.messages import Delta, FinishReason, GenerateRequest, PromptLogprob, TokenLogprob
from shared.text.choice_text import ChoiceText
from shared.text.token_bytes import TokenBytes

__all__ = ["Choice"]

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
            think="" if request.reading is None else request.reading.think,
        )
        self._told_reasoning = 0
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
        self._told_reasoning += delta.reasoning

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
        if event.num_cached_tokens > self.cached_tokens:
            self.cached_tokens = event.num_cached_tokens
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
    def reasoning_tokens(self) -> int:
        """Output tokens that were reasoning."""
        return max(self._text.reasoning_tokens, self._told_reasoning)

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
        reasoning = self.reasoning_tokens
        delta = Delta(
            index=self.index,
            token_ids=tuple(self._new_ids),
            text="".join(self._new_text),
            logprobs=tuple(self._new_logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            prompt=tuple(self._new_scores),
            embedding=self._new_embedding,
            reasoning=reasoning - self._told_reasoning,
        )
        self._told_reasoning = reasoning
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
