"""Memory a thread needs while it calls the native kernels. Made at its first call, given back with the op table."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from kernels.layout import KVCache, ModelOutput, ModelWeights

__all__ = ["Pages", "Rows", "Scratch"]

Pages = ctypes.Array[ctypes.c_void_p]


class Rows:
    """Rows of one shape: grown when more are asked for, kept, as fresh memory in every step would cost page faults. So
    are views of the first few: each costs a trip through torch."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._whole = torch.empty((0, *shape), dtype=dtype)
        self._views: dict[int, Tensor] = {}

    def first(self, count: int) -> Tensor:
        """[count, *shape], whatever it holds."""
        if count > self._whole.shape[0]:
            self._whole = torch.empty((count, *self._whole.shape[1:]), dtype=self._whole.dtype)
            self._views.clear()
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self._whole[:count]
        return view


class Scratch(threading.local):
    """What one calling thread works with: its workspace, and the page addresses of the cache it used last."""

    def __init__(self, functions: Any, threads: int, batch_invariant: bool) -> None:
        self.workspace = functions.hr_workspace_new(threads, int(batch_invariant))
        weakref.finalize(self, functions.hr_workspace_free, self.workspace)
        self.cache: KVCache | None = None
        self.pages: tuple[Pages, Pages, Pages, Pages] | None = None
        self._outputs: tuple[Rows, Rows, Rows, Rows] | None = None
        self._weights: ModelWeights | None = None

    def output(self, weights: ModelWeights, num_tokens: int, num_sampled: int, num_wanted: int) -> ModelOutput:
        """Where a forward pass of this model writes its results."""
        if self._outputs is None or self._weights is not weights:
            hidden = Rows((weights.norm.numel(),), weights.dtype)
            logits = Rows((weights.head.out_features,), torch.float32)
            self._outputs = hidden, logits, Rows((), torch.int64), Rows((), torch.float32)
            self._weights = weights
        hidden, logits, best, peaks = self._outputs
        return ModelOutput(
            hidden.first(num_tokens), logits.first(num_wanted), best.first(num_sampled), peaks.first(num_sampled)
        )
