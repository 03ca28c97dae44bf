"""Memory a thread needs while it calls the native kernels. Made at its first call, given back with the op table."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

from kernels.layout import KVCache

__all__ = ["Pages", "Scratch"]

Pages = ctypes.Array[ctypes.c_void_p]


class Scratch(threading.local):
    """What one calling thread works with: its workspace, and the page addresses of the cache it used last."""

    def __init__(self, functions: Any, threads: int, batch_invariant: bool) -> None:
        self.workspace = functions.hr_workspace_new(threads, int(batch_invariant))
        weakref.finalize(self, functions.hr_workspace_free, self.workspace)
        self.cache: KVCache | None = None
        self.pages: tuple[Pages, Pages, Pages, Pages] | None = None
