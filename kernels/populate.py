"""Gives a cache on the host its memory before it is needed, in small pieces, so that nobody waits long for one.

Memory of a fresh process is only promised. The first write to a page takes a fault and a cleared page; where the host
of a virtual machine has none at hand, ten times that. A batch that fills new blocks paid a sixth of its time for it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

from kernels.layout import KVCache

__all__ = ["populate"]

_PIECE = 2 << 20
"""Bytes at once: a large page, about a millisecond, and some ten where the host has to find it first."""
_PAGE = 4096
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; older systems refuse it, and pages come with their first write as ever."""


def populate(cache: KVCache) -> Iterator[None]:
    """One piece of the cache a turn, first the blocks that are handed out first. Changes nothing of its content.

    Ends early where the system does not do this, and at once for a cache that is not on the host.
    """
    pages = [page for layer in (*cache.layers, *cache.scales) for page in layer]
    if sys.platform != "linux" or any(page.device.type != "cpu" for page in pages):
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for offset in range(0, max(page.nbytes for page in pages), _PIECE):
        for page in pages:
            first, last = page.data_ptr() + offset, page.data_ptr() + min(offset + _PIECE, page.nbytes)
            first, last = first // _PAGE * _PAGE, -(-last // _PAGE) * _PAGE
            if first < last and madvise(first, last - first, _MADV_POPULATE_WRITE) != 0:
                return
            yield
