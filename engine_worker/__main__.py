"""`python -m engine_worker`: turns garbage collection off, then imports and runs the program."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

if __name__ == "__main__":
    # Imports and loading make hundreds of thousands of objects that stay: collections that look at them again and again
    # take a fifth of the start. The worker turns them on when it is about to serve.
    gc.disable()
    code: int = import_module("engine_worker.program").main()
    # A hung or loading thread must not keep the process, and nothing is left to clean up.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
