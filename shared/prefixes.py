"""Fingerprints of prompt beginnings: how a pod knows which worker has most of a prompt in its cache.

In: token ids. Out: 8-byte hashes at growing lengths, and a worker's bounded memory of those it has computed lately. A
hint only: a collision or a stale entry costs a cache hit, never a wrong answer, because the cache compares tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

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
    before beginnings.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held = 0
        self._tokens: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, marks: Iterable[Mark]) -> None:
        """The marks of one prompt, shortest first."""
        before, parts = 0, []
        for length, digest in marks:
            parts.append((digest, length - before))
            before = length
        for digest, tokens in reversed(parts):  # the shortest one last: it is forgotten last
            if digest not in self._tokens:
                self._held += tokens
                self._tokens[digest] = tokens
            self._tokens.move_to_end(digest)
        while self._tokens and (self._held > self._capacity or len(self._tokens) > _MOST):
            self._held -= self._tokens.popitem(last=False)[1]

    def packed(self) -> bytes:
        return b"".join(self._tokens)
