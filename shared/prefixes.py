"""Fingerprints of prompt beginnings: how a pod knows which worker has most of a prompt in its cache.

In: token ids. Out: 8-byte hashes at growing lengths, and a worker's bounded memory of those it has computed lately. A
hint only: a collision or a stale entry costs a cache hit, never a wrong answer, because the cache compares tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["FIRST_LENGTH", "PrefixMemory", "fingerprints", "unpack"]

FIRST_LENGTH = 64
"""Tokens of the shortest beginning that is worth a thought."""
_EVERY_UNTIL = 1024
"""Lengths are multiples of the first one up to here, then half as long again each: 128 thousand tokens have 28."""
_BYTES = 8
_MOST = 4096
"""Fingerprints of one worker, 32 KiB."""

Mark = tuple[int, bytes]
"""A length in tokens and the fingerprint of a prompt's first so many."""


def fingerprints(tokens: Sequence[int], salt: str = "") -> list[Mark]:
    """Shortest first. `salt`: whatever else keeps equal tokens from sharing a cache."""
    marks: list[Mark] = []
    start, length, digest = 0, FIRST_LENGTH, salt.encode()
    while length <= len(tokens):
        digest = hashlib.blake2b(array("q", tokens[start:length]).tobytes() + digest, digest_size=_BYTES).digest()
        marks.append((length, digest))
        start, length = length, length + (FIRST_LENGTH if length < _EVERY_UNTIL else length // 2)
    return marks


def unpack(packed: bytes) -> frozenset[bytes]:
    """What `PrefixMemory.packed` gave."""
    return frozenset(packed[i : i + _BYTES] for i in range(0, len(packed) - _BYTES + 1, _BYTES))


class PrefixMemory:
    """Beginnings of the prompts a worker ran last, as many as its cache of `capacity` tokens can hold.

    An estimate of the cache's content that needs nothing of the engine: both forget what was used longest ago, ends
    before beginnings. What has no fingerprint, the last tokens of prompts and all answers, takes room as well.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held = 0
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        """By digest. One of `_BYTES` is a fingerprint; what has none has a digest of its own, one byte longer."""
        self._marks = 0
        self._answers = 0

    def __len__(self) -> int:
        return self._marks

    def add(self, prompt: Sequence[int], salt: str = "") -> None:
        """A prompt that was given to the engine, or has just run."""
        marks = fingerprints(prompt, salt)
        marked, last = marks[-1] if marks else (0, salt.encode())
        if marked < len(prompt):
            tail = array("q", prompt[marked:]).tobytes()
            self._use(hashlib.blake2b(tail + last, digest_size=_BYTES + 1).digest(), len(prompt) - marked)
        befores = [0, *(length for length, _ in marks)]
        for (length, digest), before in reversed(list(zip(marks, befores, strict=False))):
            self._use(digest, length - before)  # the shortest one last: it is forgotten last
        self._forget()

    def add_answer(self, tokens: int) -> None:
        """So many tokens, which no other request is expected to share."""
        self._answers += 1
        self._use(self._answers.to_bytes(_BYTES + 1, "big"), tokens)
        self._forget()

    def packed(self) -> bytes:
        return b"".join(digest for digest in self._tokens if _is_mark(digest))

    def _use(self, digest: bytes, tokens: int) -> None:
        if digest not in self._tokens:
            self._held += tokens
            self._tokens[digest] = tokens
            self._marks += _is_mark(digest)
        self._tokens.move_to_end(digest)

    def _forget(self) -> None:
        while self._tokens and (self._held > self._capacity or len(self._tokens) > 2 * _MOST or len(self) > _MOST):
            digest, tokens = self._tokens.popitem(last=False)
            self._held -= tokens
            self._marks -= _is_mark(digest)


def _is_mark(digest: bytes) -> bool:
    return len(digest) == _BYTES
