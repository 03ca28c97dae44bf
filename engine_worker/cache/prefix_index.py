"""Which block holds which token prefix: a chained hash of full blocks, compared token by token on a hit.

In: the tokens of a request. Out: block ids with exactly that content. Knows nothing of reference counts: the cache
manager tells it when a block's content is final, the block pool when it is given up.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Prefix", "PrefixIndex", "extend", "root"]

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """All tokens up to the end of one full block, as a chain: this block's tokens and what came before.

    Parents live as long as a child does, so prefixes can be compared exactly even when ancestors' blocks are gone.
    """

    digest: bytes
    tokens: tuple[int, ...]
    parent: Prefix | None
    extra: tuple[tuple[str, str], ...] = ()
    """Of a root only: whatever else the content depends on, as (kind, value) pairs, so that no two meanings collide."""

    def same_as(self, other: Prefix) -> bool:
        """Whether both stand for the same tokens from the same root; ends at the first ancestor they share."""
        mine: Prefix | None = self
        theirs: Prefix | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.tokens != theirs.tokens or mine.extra != theirs.extra:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True

    def under(self, parent: Prefix) -> Prefix:
        """The same prefix hanging under an equal `parent`: chains that share objects are compared in one step."""
        return self if self.parent is parent else Prefix(self.digest, self.tokens, parent)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def root(*extra: tuple[str, str]) -> Prefix:
    """The empty prefix under `extra` (kind, value) pairs such as ("model", fingerprint) or ("salt", text).

    Each part is written with its length in front, so that no two lists of pairs have the same encoding.
    """
    parts = [part.encode() for pair in extra for part in pair]
    return Prefix(_digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts)), (), None, extra)


def extend(parent: Prefix, tokens: Sequence[int]) -> Prefix:
    """The prefix one full block longer. Ids are hashed as 64-bit numbers, never cut."""
    return Prefix(_digest(parent.digest + array("q", tokens).tobytes()), tuple(tokens), parent)


class PrefixIndex:
    """One block per known prefix, one prefix per block, both removed together."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, tuple[Prefix, int]] = {}
        self._by_block: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def find(self, prefix: Prefix) -> tuple[Prefix, int] | None:
        """The indexed prefix equal to this one and its block. A digest that collides is a miss, never wrong content."""
        found = self._by_digest.get(prefix.digest)
        return found if found is not None and found[0].same_as(prefix) else None

    def insert(self, prefix: Prefix, block: int) -> bool:
        """Makes `block` findable; False when the digest is taken already (same content elsewhere, or a collision)."""
        if prefix.digest in self._by_digest or block in self._by_block:
            return False
        self._by_digest[prefix.digest] = (prefix, block)
        self._by_block[block] = prefix
        return True

    def forget(self, block: int) -> None:
        """The block's content is given up. Harmless for a block that is not indexed."""
        prefix = self._by_block.pop(block, None)
        if prefix is not None:
            del self._by_digest[prefix.digest]

    def blocks(self) -> set[int]:
        return set(self._by_block)

    def check_integrity(self) -> None:
        """Both directions agree. Raises AssertionError when not."""
        forward = {(block, digest) for digest, (_, block) in self._by_digest.items()}
        backward = {(block, prefix.digest) for block, prefix in self._by_block.items()}
        if forward != backward:
            raise AssertionError(f"prefix index is inconsistent at blocks {sorted(b for b, _ in forward ^ backward)}")
