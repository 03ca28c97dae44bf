"""A cache gets its memory piece by piece, and keeps what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.layout import KVCache, new_kv_cache
from kernels.populate import populate

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process that have memory, by the kernel's own account."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make_cache(storage: torch.dtype) -> KVCache:
    return new_kv_cache(3, 2048, 16, 4, 64, torch.bfloat16, "cpu", storage)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.int8])
def test_all_of_it_is_there_afterwards_and_nothing_has_changed(storage: torch.dtype) -> None:
    before = resident()
    cache = make_cache(storage)
    pages = [page for layer in (*cache.layers, *cache.scales) for page in layer]
    for number, page in enumerate(pages):
        page.view(-1)[number] = number + 1
    assert resident() - before < cache.num_bytes // 2, "a promise takes none"
    pieces = populate(cache)
    next(pieces)
    assert resident() - before < cache.num_bytes // 2, "one piece is not all of it"
    assert len(list(pieces)) > 3
    assert resident() - before > cache.num_bytes * 0.9
    for number, page in enumerate(pages):
        assert int(page.view(-1)[number]) == number + 1
        assert int((page != 0).sum()) == 1


def test_blocks_that_are_handed_out_first_come_first() -> None:
    """The first turns serve every layer once, not the first layer as a whole."""
    cache = new_kv_cache(2, 4096, 16, 4, 64, torch.bfloat16, "cpu")
    assert cache.layers[0].key.nbytes > 8 * MIB
    pieces = populate(cache)
    for _ in range(4):
        next(pieces)
    new_kv_cache(1, 64, 16, 4, 64, torch.bfloat16, "cpu").layers[0].key.fill_(1)  # torch's own memory
    before = resident()
    for layer in cache.layers:
        for page in layer:
            page[:64].fill_(1)
    assert resident() - before < MIB
