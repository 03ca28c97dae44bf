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
from kernels.ops import Ops, PackedLinear

__all__ = ["LinearSpec", "TensorSpec", "WeightStore"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter used as it is: `name` in the checkpoint, e.g. "model.norm.weight"."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer made of one or more of the checkpoint's, stacked along the output rows in this order."""

    name: str
    parts: tuple[tuple[str, int], ...]
    """(checkpoint name without ".weight", output rows)."""
    in_features: int
    bias: bool = False

    @property
    def out_features(self) -> int:
        """Rows of all parts."""
        return sum(rows for _, rows in self.parts)


@dataclass(slots=True)
class _Buffer:
    """One parameter under construction: a fused weight, a fused bias or a plain tensor."""

    owner: str
    shape: tuple[int, ...]
    missing: set[str]
    data: Tensor | None = None


@dataclass(slots=True)
class _Part:
    """One checkpoint tensor's place: rows start … start + shape[0] - 1 of a buffer."""

    buffer: _Buffer
    start: int
    shape: tuple[int, ...]
    written: bool = False


@dataclass(slots=True)
class _Linear:
    spec: LinearSpec
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
        poison: bool = False,
    ) -> None:
        """`poison` fills new memory with NaN, so that a test sees what was never written."""
        self._ops = ops
        self._poison = poison
        self._dtype = dtype
        self._device = device
        self._parts: dict[str, _Part] = {}
        self._tensors: dict[str, _Buffer] = {}
        self._linears: dict[str, _Linear] = {}
        for spec in specs:
            if isinstance(spec, TensorSpec):
                self._tensors[spec.name] = self._declare(spec.name, [(spec.name, spec.shape[0])], spec.shape[1:])
            else:
                self._declare_linear(spec)

    def __contains__(self, name: str) -> bool:
        """Whether the model has a place for this checkpoint tensor."""
        return name in self._parts

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape this checkpoint tensor must have."""
        return self._parts[name].shape

    def destination(self, name: str) -> Tensor:
        """The memory to write checkpoint tensor `name` to, all of it, before `written(name)`."""
        part = self._parts[name]
        if part.written:
            raise LoadError(f"The checkpoint holds the tensor {name!r} twice.")
        if part.buffer.data is None:
            part.buffer.data = torch.empty(part.buffer.shape, dtype=self._dtype, device=self._device)
            if self._poison:
                part.buffer.data.fill_(float("nan"))
        return part.buffer.data[part.start : part.start + part.shape[0]]

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

    def _declare_linear(self, spec: LinearSpec) -> None:
        weights = [(f"{part}.weight", rows) for part, rows in spec.parts]
        weight = self._declare(spec.name, weights, (spec.in_features,))
        bias = None
        if spec.bias:
            bias = self._declare(spec.name, [(f"{part}.bias", rows) for part, rows in spec.parts], ())
        self._linears[spec.name] = _Linear(spec, weight, bias)

    def _declare(self, owner: str, parts: list[tuple[str, int]], rest: tuple[int, ...]) -> _Buffer:
        buffer = _Buffer(owner, (sum(rows for _, rows in parts), *rest), {name for name, _ in parts})
        start = 0
        for name, rows in parts:
            self._parts[name] = _Part(buffer, start, (rows, *rest))
            start += rows
        return buffer

    def _pack(self, linear: _Linear) -> None:
        weight, bias = linear.weight.data, linear.bias.data if linear.bias else None
        if weight is None:
            raise LoadError(f"{linear.spec.name!r} was completed without data.")
        linear.packed = self._ops.pack_linear(weight, bias)
        # The packed layer owns the data from here on.
        linear.weight.data = None
