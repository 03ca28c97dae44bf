"""The paged cache's memory."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import kv_cache_bytes, new_kv_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_new_cache_is_zero_shaped_and_counted(dtype: torch.dtype) -> None:
    cache = new_kv_cache(3, 5, 16, 2, 8, dtype, "cpu")
    assert len(cache.layers) == 3
    for layer in cache.layers:
        for pages in layer:
            assert pages.shape == (5, 16, 2, 8)
            assert pages.dtype is dtype
            assert not pages.any()
            assert pages.is_contiguous()
    assert cache.num_bytes == kv_cache_bytes(3, 5, 16, 2, 8, dtype) == 3 * 2 * 5 * 16 * 2 * 8 * dtype.itemsize


def test_layers_do_not_overlap() -> None:
    cache = new_kv_cache(2, 2, 4, 1, 2, torch.float32, "cpu")
    for number, pages in enumerate(pages for layer in cache.layers for pages in layer):
        pages.fill_(number)
    assert [int(pages.unique()) for layer in cache.layers for pages in layer] == [0, 1, 2, 3]
