"""The supervisor's last will: a tiny process that ends its children when the supervisor itself was killed.

In, on standard input: lines "+PID" and "-PID" as children come and go. Out: nothing. At the end of the input, which the
kernel brings about however the supervisor died, every child still listed gets SIGTERM and, 2 s later, SIGKILL; then the
directory named as argument is removed. Standard library only; run by path, in a session of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

__all__ = ["alive", "main"]

GRACE_S = 2.0
"""Enough for a worker to hand its requests back, and within the 3 s after which nothing may be left."""


def alive(pid: int) -> bool:
    """Whether process `pid` exists. A child whose parent died is reaped by init, so it does not linger as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            continue  # went by itself: what we want


def main(directory: str) -> None:
    """Reads until the supervisor is gone, then ends what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pids: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        (pids.add if line[0] == "+" else pids.discard)(pid)
    _signal_all(pids, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while pids and time.monotonic() < deadline:
        pids = {pid for pid in pids if alive(pid)}
        time.sleep(0.05)
    _signal_all(pids, signal.SIGKILL)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
