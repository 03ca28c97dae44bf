"""The text of one choice: token ids in, text to show out, and the stop string that ended it.

Owned by the outbox; rebuilt on a take-over by pushing the logged ids again. The text of a token that ends a choice
(EOS, stop token id) is never shown: its owner does not push it, but calls `finish`.
"""

from __future__ import annotations

from shared.params import StopConditions
from shared.text.detokenize import Detokenizer
from shared.text.stop import StopMatcher
from shared.text.thinking import ReasoningCounter
from shared.text.token_bytes import TokenBytes

__all__ = ["ChoiceText"]


class ChoiceText:
    """Detokenizer and stop matcher of one choice. Raises ValueError for an empty stop string."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        stop: StopConditions,
        *,
        continues: bool = False,
        min_tokens: int = 0,
        think: str = "",
    ) -> None:
        """`min_tokens`: stop strings are looked for in the text of later tokens only. `think`: see ReasoningCounter."""
        self._detokenizer = Detokenizer(token_bytes, stop.skip_special_tokens, continues=continues)
        self._matcher = StopMatcher(stop.stop, stop.include_stop_str_in_output)
        self._stop: str | None = None
        self._exempt = min_tokens
        self._reasoning = ReasoningCounter(think)
        self._thinks = bool(think)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the choice."""
        return self._stop

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens so far were reasoning."""
        return self._reasoning.tokens

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(text now free to show, stop string this token completed). Tokens after a stop are dropped: ("", stop)."""
        if self._stop is not None:
            return "", self._stop
        text = self._detokenizer.push_one(token_id)
        if self._thinks:
            self._reasoning.push(text)
        if self._exempt > 0:
            self._exempt -= 1
            return text, None
        text, self._stop = self._matcher.push(text)
        return text, self._stop

    def finish(self) -> str:
        """The rest when no stop string ended the choice: held-back text, one U+FFFD for an unfinished character."""
        if self._stop is not None:
            return ""
        text, self._stop = self._matcher.push(self._detokenizer.flush())
        return text if self._stop is not None else text + self._matcher.flush()
