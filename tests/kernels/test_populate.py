"""A cache gets its memory piece by piece, and keeps what it holds."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from torch import Tensor

from kernels.layout import KVCache, LayerCache
from kernels.populate import populate

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
MIB = 1 << 20


def resident(page: Tensor) -> float:
    """The part of a tensor's memory that the system has given, by its own account."""
    begin = page.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = page.data_ptr() + page.nbytes - begin
    states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert LIBC.mincore(begin, size, states) == 0, ctypes.get_errno()
    return sum(state & 1 for state in states) / len(states)


def fresh(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros that have only been promised; what malloc gives may have been somebody's before. 640 bytes past a page."""
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.frombuffer(mmap.mmap(-1, size + 640), dtype=torch.uint8)
    return raw[640:].view(dtype).view(shape)


def make_cache(storage: torch.dtype, num_blocks: int = 2048) -> KVCache:
    shape = (2, 2, num_blocks, 16, 4)
    pages = fresh(*shape, 64, dtype=storage)
    layers = tuple(LayerCache(layer[0], layer[1]) for layer in pages)
    scales = fresh(*shape, dtype=torch.float32) if storage is torch.int8 else ()
    return KVCache(
        layers=layers,
        num_blocks=num_blocks,
        block_size=16,
        num_kv_heads=4,
        head_dim=64,
        dtype=torch.bfloat16,
        scales=tuple(LayerCache(layer[0], layer[1]) for layer in scales),
    )


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.int8])
def test_all_of_it_is_there_afterwards_and_nothing_has_changed(storage: torch.dtype) -> None:
    cache = make_cache(storage)
    pages = [page for layer in (*cache.layers, *cache.scales) for page in layer]
    for number, page in enumerate(pages):
        page.view(-1)[number] = number + 1
    pieces = populate(cache)
    next(pieces)
    assert resident(cache.layers[1].value) < 0.7, "one piece is not all of it"
    assert len(list(pieces)) > 3
    assert [resident(page) for page in pages] == [1.0] * len(pages)
    for number, page in enumerate(pages):
        assert int(page.view(-1)[number]) == number + 1
        assert int((page != 0).sum()) == 1


def test_blocks_that_are_handed_out_first_come_first() -> None:
    """The first turns serve every layer once, not the first layer as a whole."""
    cache = make_cache(torch.bfloat16, 4096)
    pages = [page for layer in cache.layers for page in layer]
    pieces = populate(cache)
    for _ in pages:
        next(pieces)
    for page in pages:
        assert page.nbytes > 16 * MIB
        assert resident(page[:200]) == 1.0
        assert resident(page) < 0.5
