"""Where checkpoint tensors go. A model declares its fused parameters; the loader writes each part once; nothing is
left out.

Parts are placed by name and size (never by equal splits: query and key heads differ in number). A parameter's memory is
allocated when its first part arrives, and packed into the backend's layout when its last part is there, so at most a
few parameters exist twice at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine_worker.errors import LoadError
from engine_worker.layers.specs import LinearSpec, TensorSpec
from engine_worker.quant.scheme import Scheme, Storage
from kernels.ops import BLOCK_BYTES, Ops, PackedLinear, QuantizedTensor

__all__ = ["WeightStore"]

_BLOCK = 32


@dataclass(slots=True)
class _Buffer:
    """One parameter under construction: a fused weight, a fused bias or a plain tensor."""

    owner: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    missing: set[str]
    data: Tensor | None = None


@dataclass(slots=True)
class _Part:
    """One checkpoint tensor's place: rows start … start + shape[0] - 1 of a buffer. `shape` is the tensor's own, also
    where the buffer holds blocks."""

    buffer: _Buffer
    start: int
    shape: tuple[int, ...]
    written: bool = False


@dataclass(slots=True)
class _Linear:
    spec: LinearSpec
    storage: Storage
    weight: _Buffer
    bias: _Buffer | None
    packed: PackedLinear | None = field(default=None)


class WeightStore:
    """Takes a model's weights in any order. Not thread-safe; thrown away when the model is made."""

    def __init__(
        self,
        specs: Iterable[TensorSpec | LinearSpec],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scheme: Scheme | None = None,
        poison: bool = False,
    ) -> None:
        """scheme: how matrices are kept; None: in `dtype`. `poison` fills new memory with NaN (blocks: with scales of
        NaN), so that a test sees what was never written."""
        self._ops = ops
        self._scheme = scheme or Scheme("none", {})
        self._num_bytes = 0
        self._poison = poison
        self._dtype = dtype
        self._device = device
        self._parts: dict[str, _Part] = {}
        self._tensors: dict[str, _Buffer] = {}
        self._linears: dict[str, _Linear] = {}
        for spec in specs:
            if isinstance(spec, TensorSpec):
                parts = [(spec.name, spec.shape[0])]
                self._tensors[spec.name] = self._declare(spec.name, parts, spec.shape[1:], torch.float32)
            else:
                self._declare_linear(spec)

    def __contains__(self, name: str) -> bool:
        """Whether the model has a place for this checkpoint tensor."""
        return name in self._parts

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape this checkpoint tensor must have."""
        return self._parts[name].shape

    def destination(self, name: str) -> Tensor:
        """The memory to write checkpoint tensor `name` to, all of it, before `written(name)`: floats of its shape, or
        uint8 rows of GGUF blocks where the scheme keeps those."""
        part = self._parts[name]
        if part.written:
            raise LoadError(f"The checkpoint holds the tensor {name!r} twice.")
        buffer = part.buffer
        if buffer.data is None:
            buffer.data = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            if self._poison:
                buffer.data.fill_(255 if buffer.dtype is torch.uint8 else float("nan"))
        return buffer.data[part.start : part.start + part.shape[0]]

    def written(self, name: str) -> None:
        """Marks `name` as complete; packs its linear layer when that was the last part."""
        part = self._parts[name]
        part.written = True
        part.buffer.missing.discard(name)
        linear = self._linears.get(part.buffer.owner)
        if linear is not None and not linear.weight.missing and not (linear.bias and linear.bias.missing):
            self._pack(linear)

    def missing(self) -> list[str]:
        """Checkpoint tensors the model needs and has not got, in order of declaration."""
        return [name for name, part in self._parts.items() if not part.written]

    def tensor(self, name: str) -> Tensor:
        """A finished plain parameter."""
        data = self._tensors[name].data
        if data is None or self._tensors[name].missing:
            raise LoadError(f"The checkpoint lacks the tensor {name!r}.")
        return data

    def linear(self, name: str) -> PackedLinear:
        """A finished linear layer."""
        packed = self._linears[name].packed
        if packed is None:
            raise LoadError(f"The checkpoint lacks tensors of {name!r}: {', '.join(self.missing()[:5])}.")
        return packed

    @property
    def num_bytes(self) -> int:
        """Bytes of all finished parameters, as they are kept."""
        plain = (buffer.data.nbytes for buffer in self._tensors.values() if buffer.data is not None)
        return self._num_bytes + sum(plain)

    def formats(self) -> list[str]:
        """Quantized formats in use, in order of the alphabet."""
        return sorted({linear.storage.format for linear in self._linears.values()} - {""})

    def _declare_linear(self, spec: LinearSpec) -> None:
        storage = self._scheme.storage(spec.weights(), precise=spec.precise)
        parts = [(f"{part}.weight", rows) for part, rows in spec.parts]
        weight = self._declare(spec.name, parts, (spec.in_features,), storage.staging or self._dtype)
        if storage.blocks:
            weight.shape = (spec.out_features, spec.in_features // _BLOCK * BLOCK_BYTES[storage.format])
            weight.dtype = torch.uint8
        bias = None
        if spec.bias:
            bias = self._declare(spec.name, [(f"{part}.bias", rows) for part, rows in spec.parts], (), self._dtype)
        self._linears[spec.name] = _Linear(spec, storage, weight, bias)

    def _declare(self, owner: str, parts: list[tuple[str, int]], rest: tuple[int, ...], dtype: torch.dtype) -> _Buffer:
        buffer = _Buffer(owner, (sum(rows for _, rows in parts), *rest), dtype, {name for name, _ in parts})
        start = 0
        for name, rows in parts:
            self._parts[name] = _Part(buffer, start, (rows, *rest))
            start += rows
        return buffer

    def _pack(self, linear: _Linear) -> None:
        spec, storage = linear.spec, linear.storage
        data, bias = linear.weight.data, linear.bias.data if linear.bias else None
        if data is None:
            raise LoadError(f"{spec.name!r} was completed without data.")
        weight = QuantizedTensor(data, storage.format, spec.in_features) if storage.blocks else data
        try:
            if spec.lookup:
                linear.packed = self._ops.pack_embedding(weight, storage.format)
            else:
                linear.packed = self._ops.pack_linear(weight, bias, storage.format)
        except ValueError as error:
            raise LoadError(f"{spec.name!r} cannot be kept as {storage.format}: {error}.") from error
        # The packed layer owns the data from here on.
        linear.weight.data = None
        self._num_bytes += linear.packed.weight.nbytes + (0 if bias is None else bias.nbytes)
