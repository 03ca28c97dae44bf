"""`make bench` runs every benchmark, `make bench ARGS="engine_throughput --dtype float32"` one with its flags."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def main() -> int:
    """Exit code 2 for a name that is not a benchmark."""
    names, flags = (sys.argv[1:2], sys.argv[2:]) if len(sys.argv) > 1 else (NAMES, [])
    for name in names:
        if name not in NAMES:
            print(f"no benchmark {name!r}; there are: {', '.join(NAMES)}", file=sys.stderr)
            return 2
        print(f"== {name}", flush=True)
        sys.argv = [f"benchmarks.{name}", *flags]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
