"""`python -m api_service`: turns garbage collection off, then imports and runs the program, which turns it on again."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

if __name__ == "__main__":
    gc.disable()  # imports make 100,000 objects that stay; looking at them again and again takes a tenth of the start
    sys.exit(import_module("api_service.program").main())
