"""Ids of the KV cache's blocks: which are free, which are held, which hold content worth keeping. No tensors.

In: how many blocks a request needs, and back. Out: block ids. A block is in exactly one of three states: free (no
content), held (referenced by one or more requests), cached (unreferenced, content kept until the room is needed).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

__all__ = ["BlockPool", "OutOfBlocks"]


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or evictable; nothing was taken."""


class BlockPool:
    """Reference counts over `num_blocks` block ids, with least-recently-released eviction of unreferenced content.

    `on_evict(block)` is called when the content of a cached block is given up, before the id is handed out again.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._keep = [False] * num_blocks
        # A stack, lowest id on top: a small load touches a small part of the cache's memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Oldest first: the order in which content is given up.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content is kept."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """What `allocate` can hand out: kept content counts as room."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_kept(self, block: int) -> bool:
        return self._keep[block]

    def is_cached(self, block: int) -> bool:
        """Whether the block is unreferenced with its content kept, so that sharing it takes it out of the available."""
        return block in self._cached

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each and no content. Raises OutOfBlocks, taking none, if too many."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_available} available")
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._keep[block] = False
            self._on_evict(block)
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each, held or cached. Raises ValueError on a free block, whose content is gone."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives back one reference to each, in this order: of kept blocks the first released is the first evicted.

        Raises ValueError when a block is not held: a reference count never goes below zero.
        """
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is released but not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._keep[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """The content of a held block is final and may be found again: keep it after the last release."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not held, its content cannot be kept")
        self._keep[block] = True

    def discard(self, block: int) -> None:
        """The content is not to be found again: the block becomes free now, or at its last release."""
        self._keep[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check_integrity(self) -> None:
        """Every block is in exactly one state: free + cached + held = total. Raises AssertionError with the rest."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count > 0}
        problems = {
            "negative reference count": [block for block, count in enumerate(self._references) if count < 0],
            "free twice": len(self._free) - len(free),
            "in two states": (free & cached) | (free & held) | (cached & held),
            "in no state": set(range(self.num_blocks)) - free - cached - held,
            "kept although free": [block for block in free if self._keep[block]],
            "cached but not kept": [block for block in cached if not self._keep[block]],
        }
        found = {name: what for name, what in problems.items() if what}
        if found:
            raise AssertionError(f"block pool is inconsistent: {found}")
