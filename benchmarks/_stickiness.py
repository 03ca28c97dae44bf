"""What perfect stickiness would find cached: every request goes to the worker that has its prefix, at no cost of time.

In: the order of requests, blocks of a worker's cache. Out: prompt tokens found. An oracle of its own, without the
engine's cache: per worker one list of blocks by last use, the oldest forgotten first, a prefix from its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

__all__ = ["perfect_hits"]

_Block = tuple[int, int]
"""(prefix, place in it); tails of request n are (-1 - n, place)."""


class _Cache:
    """One worker's blocks, oldest use first."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[_Block, int] = OrderedDict()

    def found(self, prefix: int, length: int) -> int:
        """Blocks of the prefix, from its beginning on."""
        return next((place for place in range(length) if (prefix, place) not in self._held), length)

    @property
    def oldest(self) -> int:
        """When its oldest block was used last; -1: there is room that was never used."""
        return next(iter(self._held.values())) if len(self._held) == self._blocks else -1

    def run(self, now: int, prefix: int, length: int, tail: int, working: int) -> None:
        """A request of `length` shared and `tail` own full blocks, which needs `working` more until it ends."""
        for place in range(length):
            self._held.pop((prefix, place), None)
        while len(self._held) > max(0, self._blocks - length - tail - working):
            self._held.popitem(last=False)
        for place in reversed(range(tail)):
            self._held[-1 - now, place] = now
        for place in reversed(range(length)):
            self._held[prefix, place] = now


def perfect_hits(prefixes: Sequence[int], *, workers: int, blocks: int, block: int, shared: int, rest: int) -> int:
    """Tokens found by the better one of two rules, each request ending before the next one comes.

    prefixes: which prefix each request has; `shared` tokens of it are common, `rest` its own and its answer's. The
    rules for a prefix that nobody has: to the worker with the oldest block; to the one that was given fewest prefixes.
    """
    homes: dict[int, int] = {}

    def fewest(prefix: int, _caches: Sequence[_Cache]) -> int:
        given = list(homes.values())
        return homes.setdefault(prefix, min(range(workers), key=given.count))

    def oldest(_prefix: int, caches: Sequence[_Cache]) -> int:
        return min(range(workers), key=lambda worker: caches[worker].oldest)

    return block * max(
        _hits(prefixes, [_Cache(blocks) for _ in range(workers)], shared // block, rest, block, rule)
        for rule in (fewest, oldest)
    )


def _hits(
    prefixes: Sequence[int],
    caches: Sequence[_Cache],
    length: int,
    rest: int,
    block: int,
    rule: Callable[[int, Sequence[_Cache]], int],
) -> int:
    hits = 0
    for now, prefix in enumerate(prefixes):
        found, worker = max((cache.found(prefix, length), -index) for index, cache in enumerate(caches))
        chosen = -worker if found else rule(prefix, caches)
        hits += caches[chosen].found(prefix, length)
        # The last token of the answer is never computed, and a block that is not full is not kept.
        caches[chosen].run(now, prefix, length, (rest - 1) // block, 1)
    return hits
