"""Weights of a Hugging Face directory: model.safetensors, or the shards an index lists. Memory-mapped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_worker.errors import LoadError
from engine_worker.models.loading.checkpoint import TensorInfo

__all__ = ["SafetensorsCheckpoint"]

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsCheckpoint:
    """A `Checkpoint`."""

    def __init__(self, directory: Path) -> None:
        self._tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Any] = {}
        for path in _files(directory):
            self._open(path)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `Checkpoint`."""
        return self._tensors

    def read(self, name: str, destination: Tensor) -> None:
        """See `Checkpoint`."""
        destination.copy_(self._files[name].get_tensor(name))

    def sample(self, name: str, size: int) -> bytes:
        """See `Checkpoint`."""
        info = self._tensors[name]
        rows = max(1, size // max(1, info.num_bytes // max(1, info.shape[0])))
        head: Tensor = self._files[name].get_slice(name)[:rows]
        return head.float().numpy().tobytes()[:size]

    def _open(self, path: Path) -> None:
        try:
            # The library is not typed.
            file: Any = safe_open(str(path), framework="pt")
        except FileNotFoundError as error:
            raise LoadError(f"{path} is missing, although the index names it.") from error
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path} is damaged or incomplete: {error}") from error
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            view = file.get_slice(name)
            kind, shape = view.get_dtype(), tuple(view.get_shape())
            if kind not in _ITEM_BYTES:
                raise LoadError(
                    f"{path}: the tensor {name!r} is stored as {kind}. Only plain float checkpoints "
                    f"({', '.join(sorted(_ITEM_BYTES))}) are supported; for quantised weights use a GGUF file."
                )
            if name in self._tensors:
                raise LoadError(f"{path}: the tensor {name!r} is also in another shard.")
            self._tensors[name] = TensorInfo(shape, kind, math.prod(shape) * _ITEM_BYTES[kind])
            self._files[name] = file


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise LoadError(f"{index} is damaged: {error!r}") from error
        return [directory / name for name in sorted(names)]
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    raise LoadError(f"{directory} holds no model.safetensors (weights in other formats must be converted first).")
