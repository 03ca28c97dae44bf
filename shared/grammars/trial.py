"""The program that tries a grammar for a pod: `python -m shared.grammars.trial`, one JSON line in, one out.

A compilation can run for ever (an intersection of patterns does), and a thread cannot be killed: this process can. It
ends itself, by a timer of the kernel, when one grammar takes more than CPU_LIMIT_S of processor time. A tokenizer of
single bytes is enough to find out whether a grammar compiles, can match at all, and stays within its limits.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any, cast

import numpy as np

from shared.grammars.backend import GrammarError, first_line, grammar_text, limits, llguidance
from shared.params import GrammarSpec

__all__ = ["CPU_LIMIT_S", "main", "try_grammar"]

CPU_LIMIT_S = 1.0
_WALK = 24
"""Bytes written by way of trial: some limits are only reached behind the first ones."""
_END = 256
_WHITESPACE = frozenset(b" \t\r\n")


class _Bytes:
    """A vocabulary of the 256 bytes and an end token."""

    is_tokenizer_wrapper = True
    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


_TOKENIZER = llguidance.LLTokenizer(cast("Any", _Bytes()), n_vocab=_END + 1, eos_token=_END, slices=[])


def try_grammar(spec: GrammarSpec) -> str:
    """Why the grammar cannot be used, "" when it can."""
    try:
        text = grammar_text(spec)
    except GrammarError as error:
        return str(error)
    matcher = llguidance.LLMatcher(_TOKENIZER, text, log_level=0, limits=limits())
    for _ in range(_WALK):
        if matcher.is_error():
            return first_line(matcher.get_error())
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=_END + 1).nonzero()[0].tolist()
        if matcher.is_error():
            return _reason(matcher.get_error())
        if not allowed:
            return "nothing can ever match it"
        token = next((byte for byte in allowed if byte not in _WHITESPACE), allowed[0])
        if token == _END or not matcher.consume_token(token):
            break
    return first_line(matcher.get_error()) if matcher.is_error() else ""


def _reason(message: str) -> str:
    return "nothing can ever match it" if message.startswith("NoExtension") else first_line(message)


def main() -> None:
    """Until standard input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        reason = try_grammar(GrammarSpec(kind, text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason), flush=True)


if __name__ == "__main__":
    main()
