"""Which tokens of an answer are reasoning: those up to the closing tag of models that think inside <think> … </think>.

In: how the answer begins, and the text that each token adds. Out: a count. A function of the tokens alone, so a
take-over counts alike.
"""

from __future__ import annotations

__all__ = ["THINK_CLOSE", "THINK_OPEN", "ReasoningCounter"]

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class ReasoningCounter:
    """`think`: "open", the answer begins inside the tags; "maybe", it may begin with one; "", nothing is counted."""

    def __init__(self, think: str) -> None:
        self._phase = {"open": "inside", "maybe": "before"}.get(think, "done")
        self._held = ""
        self._undecided = 0
        self.tokens = 0
        """Tokens of the reasoning so far, its tags included."""

    def push(self, text: str) -> None:
        """The text of one more token, "" for one that only begins a character."""
        if self._phase == "done":
            return
        self._held += text
        if self._phase == "before":
            self._undecided += 1
            if not self._begins():
                return
            self.tokens = self._undecided
        else:
            self.tokens += 1
        if THINK_CLOSE in self._held:
            self._phase, self._held = "done", ""
        else:
            self._held = self._held[-len(THINK_CLOSE) :]

    def _begins(self) -> bool:
        """Whether the opening tag is complete; anything else before it means that there is no reasoning."""
        began = self._held.lstrip()
        if began.startswith(THINK_OPEN):
            self._phase, self._held = "inside", began.removeprefix(THINK_OPEN)
            return True
        if not THINK_OPEN.startswith(began):
            self._phase, self._held = "done", ""
        return False
