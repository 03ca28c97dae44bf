"""The one error of grammars."""

from __future__ import annotations

__all__ = ["GrammarError"]


class GrammarError(ValueError):
    """A grammar that cannot be compiled, can never match, or is too complex. The message is for the client."""
