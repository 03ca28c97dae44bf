"""Free ports that stay free until their server listens, and while it is away to be started again.

The kernel takes the near end of every outgoing connection from its ephemeral range. A server's port from that range may
be such an end by the time it binds, and a client that tries a dead server there can even connect to itself. So ports
come from below the range, and none is handed out twice.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_port"]

_LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()
_rng = random.SystemRandom()
"""Not the seeded one: several test runs share a machine."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on. AssertionError when there is none."""
    for _ in range(1000):
        port = _rng.randrange(_LOWEST, _first_ephemeral())
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise AssertionError(f"no free port from {_LOWEST} to {_first_ephemeral()}")


def _first_ephemeral() -> int:
    if _EPHEMERAL.exists():
        first = int(_EPHEMERAL.read_text().split()[0])
        if first > _LOWEST + 1000:
            return first
    return 32_768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
