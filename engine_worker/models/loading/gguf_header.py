"""The header of a GGUF file: metadata as Python values and where its tensors lie. Needs no torch.

The gguf library's reader wraps every string of the vocabulary in numpy objects (seconds for 100,000 tokens); this one
walks the same bytes once with plain slices. Format: the GGUF specification, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine_worker.errors import LoadError

__all__ = ["GgufEntry", "GgufHeader", "GgufValue"]

GgufValue = bool | int | float | str | list["GgufValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """What the header says of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first."""
    kind: int
    """Number of its quantisation."""
    start: int
    """Byte offset in the file."""


class GgufHeader:
    """The memory-mapped file with its header read. Raises LoadError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Copy-on-write: torch wants writable memory, nobody writes to it.
        self.data: np.ndarray[Any, np.dtype[np.uint8]] = (
            np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else np.zeros(0, np.uint8)
        )
        try:
            self.metadata, self.entries = _read_header(_Reader(self.data.data))
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise LoadError(f"{path} is damaged or incomplete: its header cannot be read ({error}).") from error
        except LoadError as error:
            raise LoadError(f"{path}: {error}") from error


class _Reader:
    """A cursor over the header."""

    __slots__ = ("data", "offset")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, kind: struct.Struct) -> bool | int | float:
        (value,) = kind.unpack_from(self.data, self.offset)
        self.offset += kind.size
        return value  # type: ignore[no-any-return]

    def count(self) -> int:
        return int(self.scalar(_U64))

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary and its merges are some 100,000 of these."""
        data, offset, unpack, size = self.data, self.offset, _U64.unpack_from, _U64.size
        values = []
        for _ in range(count):
            start = offset + size
            offset = start + unpack(data, offset)[0]
            values.append(str(data[start:offset], "utf-8"))
        if offset > len(data):
            raise struct.error("a string ends past the end of the file")
        self.offset = offset
        return values

    def value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise LoadError(f"its header holds a value of the unknown type {kind}.")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[GgufValue]:
        kind, count = int(self.scalar(_U32)), self.count()
        if kind == _STRING:
            return list(self.strings(count))
        if kind in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[kind].format[-1]}")
            values = list(layout.unpack_from(self.data, self.offset))
            self.offset += layout.size
            return values
        return [self.value(kind) for _ in range(count)]


def _read_header(reader: _Reader) -> tuple[Mapping[str, GgufValue], list[GgufEntry]]:
    if bytes(reader.data[:4]) != _MAGIC:
        raise LoadError("this is not a GGUF file.")
    reader.offset = 4
    version = int(reader.scalar(_U32))
    if version not in _VERSIONS:
        raise LoadError(f"GGUF version {version} is not supported (2 and 3 are, little endian).")
    num_tensors, num_values = reader.count(), reader.count()
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_values):
        key = reader.string()
        metadata[key] = reader.value(int(reader.scalar(_U32)))
    entries = [_read_entry(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise LoadError(f"general.alignment is {alignment!r}.")
    base = math.ceil(reader.offset / alignment) * alignment
    return metadata, [GgufEntry(name, shape, kind, base + start) for name, shape, kind, start in entries]


def _read_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string()
    dimensions = [reader.count() for _ in range(int(reader.scalar(_U32)))]
    return name, tuple(reversed(dimensions)), int(reader.scalar(_U32)), reader.count()
