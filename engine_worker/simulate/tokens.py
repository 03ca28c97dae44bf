"""Which tokens a simulated answer has: a function of (seed, prompt, request's seed, position), so that losses show.

In: the vocabulary's ordinary tokens and a seed. Out: token ids. Whoever knows the request can say every token of its
answer, so a test or a load client notices one that is missing, doubled, or somebody else's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from shared.text.token_bytes import TokenBytes

__all__ = ["TokenSource", "ordinary_tokens"]

_MASK64 = (1 << 64) - 1
_LENGTH = _MASK64
"""The position whose number decides how long an answer is."""


def ordinary_tokens(token_bytes: TokenBytes) -> tuple[int, ...]:
    """Ids whose text stands for itself wherever it comes: whole printable characters, no special token.

    Raises ValueError when there are none.
    """
    found = tuple(i for i, data in enumerate(token_bytes.table) if i not in token_bytes.special and _plain(data))
    if not found:
        raise ValueError("the tokenizer has no ordinary tokens to make answers of")
    return found


def _plain(data: bytes) -> bool:
    try:
        return bool(data) and data.decode().isprintable()
    except UnicodeDecodeError:
        return False


class TokenSource:
    """Answers made of `vocabulary`."""

    def __init__(self, vocabulary: Sequence[int], seed: int) -> None:
        self.vocabulary = tuple(vocabulary)
        self._seed = seed

    def key(self, prompt: Sequence[int], request_seed: int | None) -> int:
        """What tells one answer from another: 64 bits. `request_seed` None: greedy, which no seed changes."""
        head = f"{self._seed}/{'greedy' if request_seed is None else request_seed}/".encode()
        return int.from_bytes(hashlib.blake2b(head + array("q", prompt).tobytes(), digest_size=8).digest(), "little")

    def token(self, key: int, position: int, skip: int = 0) -> int:
        """The token at `position` of the answer; `skip` > 0 names others, for one that must not be said."""
        return self.vocabulary[(_mix(key, position) + skip) % len(self.vocabulary)]

    def length(self, key: int, mean: int) -> int:
        """Tokens before the answer ends by itself: between half of `mean` and one and a half times as many."""
        return max(1, mean - mean // 2 + _mix(key, _LENGTH) % (mean + 1))


def _mix(key: int, position: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014) at `position` of the sequence that `key` begins."""
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
