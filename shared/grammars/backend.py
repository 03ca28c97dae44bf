"""The one place that imports llguidance, which may be missing: then grammars are refused and all else works.

In: grammar specs and token matchers. Out: llguidance's own grammar text, limits, and filled token masks. No msgspec, no
tokenizers: the engine imports this module.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shared.grammars.ending import JsonEnding
from shared.grammars.errors import GrammarError
from shared.grammars.repeats import check_lark
from shared.params import GrammarSpec

try:
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark
except ImportError:  # a machine that only computes
    llguidance = None  # type: ignore[assignment]

__all__ = ["MAX_INDENT", "GrammarError", "TokenMatcher", "fill_masks", "grammar_text", "limits", "llguidance"]

MAX_INDENT = 8
"""White space between two JSON tokens is one or two spaces, or a line break and so many blanks at most. Without a bound
a model may write nothing else, and with a wide one small models spend their tokens on empty lines."""
_MESSAGE_LENGTH = 300
_PIECE_LENGTH = 40
_IN_PATTERN = re.compile(r'(?:at \d+\(\d+\): )?invalid regex "(?:[^"\\]|\\.)*" \(in regex\): ')
"""What the library puts before a pattern's error: a place in its own grammar text, and the whole pattern."""
_CARETS = re.compile(r" +(\^+)[ ^]*$")

_JSON_OPTIONS: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": rf"\x20{{1,2}}|\x0A[\x20\x09]{{0,{MAX_INDENT}}}",
    "coerce_one_of": False,
    "lenient": False,
}
"""Set as overrides, so that a schema's own `x-guidance` has no say."""


def grammar_text(spec: GrammarSpec) -> str:
    """llguidance's spelling of the grammar. Raises GrammarError."""
    _require_library()
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "lark":
        lark = _lark(spec.text)
        check_lark(lark)
        return llguidance.LLMatcher.grammar_from_lark(lark)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(spec.text, overrides=cast("Any", _JSON_OPTIONS))
    except ValueError as error:
        raise GrammarError(first_line(str(error))) from None


def _lark(text: str) -> str:
    """Lark as it is, GBNF translated."""
    try:
        lark: str = any_to_lark(text)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the translator says what is wrong with a text in plain Exceptions as well
        raise GrammarError(first_line(str(error))) from None
    return lark


def limits() -> llguidance.LLParserLimits:
    """What bounds time and memory of one grammar; past a limit it fails, alone."""
    return llguidance.LLParserLimits(
        max_items_in_row=10_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def first_line(message: str) -> str:
    """The library's words without its dump of the grammar; of a pattern's parse error the line that says why."""
    lines = message.strip().splitlines() or ["it cannot be compiled"]
    first, in_pattern = _IN_PATTERN.subn("invalid regex: ", lines[0])
    why = next((i for i, line in enumerate(lines) if line.startswith("error: ")), None)
    if why is not None and (in_pattern or first.startswith("regex parse error")):
        first = f"invalid regex: {lines[why].removeprefix('error: ')}{_piece(lines[:why])}"
    elif "too many expressions" in first:
        first = f"it is too complex ({first})"
    return first[:_MESSAGE_LENGTH]


def _piece(lines: Sequence[str]) -> str:
    """What the library underlines in the pattern that it repeats above."""
    for pattern, line in itertools.pairwise(lines):
        if (carets := _CARETS.match(line)) and (piece := pattern[carets.start(1) : carets.end(1)]):
            return f" near '{piece[:_PIECE_LENGTH]}'"
    return ""


def _require_library() -> None:
    if llguidance is None:
        raise GrammarError("Structured output needs the package llguidance, which is not installed here.")


class TokenMatcher:
    """The grammar's state of one choice. `follow` takes all of the output: a take-over just starts with more of it."""

    def __init__(self, matcher: llguidance.LLMatcher, ending: JsonEnding | None = None) -> None:
        """`ending` narrows what the grammar allows, where that is JSON."""
        self.state = matcher
        self._ending = ending
        self._num_taken = 0

    def follow(self, output: Sequence[int]) -> None:
        """Takes in what is new of the output. A token that does not fit ends the grammar: no token can follow."""
        fresh = list(output[self._num_taken :])
        self._num_taken = len(output)
        if fresh:
            self.state.consume_tokens(fresh)
            if self._ending is not None:
                self._ending.follow(fresh)

    def narrow(self, allowed: NDArray[np.bool_]) -> None:
        """allowed bool [vocab_size], changed in place: of what may follow, what leads to an end."""
        if self._ending is not None:
            self._ending.narrow(allowed)

    @property
    def failed(self) -> bool:
        """Whether nothing can follow any more: a token that did not fit, or a limit was reached."""
        return self.state.is_error()


def fill_masks(matchers: Sequence[TokenMatcher], vocab_size: int) -> NDArray[np.bool_]:
    """Which tokens may follow each matcher's output: bool [len(matchers), vocab_size]; all False where it failed.

    Blocks without the interpreter's lock, on as many cores as llguidance sees.
    """
    words = -(-vocab_size // 32)
    bits = np.zeros((len(matchers), words), dtype=np.int32)
    if len(matchers) == 1:
        matchers[0].state.unsafe_compute_mask_ptr(bits.ctypes.data, words * 4)
    else:
        numbered = [(matcher.state, i) for i, matcher in enumerate(matchers)]
        _executor().unsafe_compute_mask_ptr(numbered, bits.ctypes.data, words * 4, len(matchers))
    for i, matcher in enumerate(matchers):
        if matcher.failed:
            bits[i] = 0
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=vocab_size).view(np.bool_)
    for matcher, row in zip(matchers, allowed, strict=True):
        matcher.narrow(row)
    return allowed


_executors: list[llguidance.LLExecutor] = []


def _executor() -> llguidance.LLExecutor:
    """Made once, by the first batch with several grammars."""
    if not _executors:
        _executors.append(llguidance.LLExecutor())
    return _executors[0]
