"""A GGUF file, memory-mapped: metadata as Python values, tensors as raw bytes on demand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from engine_worker.errors import LoadError
from engine_worker.models.loading.gguf_header import GgufEntry, GgufHeader
from engine_worker.quant.dequantize import row_bytes

__all__ = ["GgufFile", "GgufTensor"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's entry in the file."""

    name: str
    shape: tuple[int, ...]
    """As torch has it, slowest dimension first."""
    kind: GGMLQuantizationType
    start: int
    """Byte offset in the file."""
    num_bytes: int


class GgufFile(GgufHeader):
    """An open file. The mapping lives as long as this object or a tensor taken from it. Raises LoadError."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.tensors: Mapping[str, GgufTensor] = {entry.name: _place(entry) for entry in self.entries}
        except LoadError as error:
            raise LoadError(f"{path}: {error}") from error
        self._check_extent()

    def raw(self, tensor: GgufTensor) -> Tensor:
        """The tensor's bytes, uint8 [shape[0], bytes of a row], a view of the file. A vector is a column."""
        data = self.data[tensor.start : tensor.start + tensor.num_bytes]
        return torch.from_numpy(data).view(tensor.shape[0], -1)

    def _check_extent(self) -> None:
        for tensor in self.tensors.values():
            if tensor.start + tensor.num_bytes > self.data.size:
                raise LoadError(
                    f"{self.path} is incomplete: the tensor {tensor.name!r} ends at byte "
                    f"{tensor.start + tensor.num_bytes}, the file at {self.data.size}. Download it again."
                )


def _place(entry: GgufEntry) -> GgufTensor:
    try:
        quantization = GGMLQuantizationType(entry.kind)
    except ValueError as error:
        raise LoadError(f"the tensor {entry.name!r} has the unknown format {entry.kind}.") from error
    num_bytes = math.prod(entry.shape[:-1]) * row_bytes(quantization, entry.shape[-1])
    return GgufTensor(entry.name, entry.shape, quantization, entry.start, num_bytes)
