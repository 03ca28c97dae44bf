"""Checks of single flags: a value in, out what would be allowed when it is not, else None."""

from __future__ import annotations

import re
from pathlib import Path

from shared.simulation import parse_simulation

__all__ = ["key_file", "name", "redis_url", "root_path", "simulation", "size"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SMALLEST_CACHE = 1 << 16
_NAME = re.compile(r"[\w./:@+-]+")


def size(value: str) -> str | None:
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        return "a number of bytes, with K, M or G if you like (1G, 512M, 1073741824)"
    return None if float(match[1]) * _UNITS[match[2].upper()] >= _SMALLEST_CACHE else "64K or more"


def key_file(value: str) -> str | None:
    try:
        return None if Path(value).read_text(encoding="utf-8").split() else "a file with at least one key"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        return f"a file that can be read ({reason})"


def redis_url(value: str) -> str | None:
    good = value.startswith(("redis://", "rediss://", "unix://"))
    return None if good else "redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH/TO/SOCKET"


def name(value: str) -> str | None:
    return None if _NAME.fullmatch(value) else "letters, digits and . _ / : @ + -"


def simulation(value: str) -> str | None:
    try:
        parse_simulation(value)
    except ValueError as error:
        return str(error)
    return None


def root_path(value: str) -> str | None:
    return None if value == "" or (value.startswith("/") and not value.endswith("/")) else "a path such as /llm"
