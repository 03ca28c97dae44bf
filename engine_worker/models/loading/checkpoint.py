"""What the two file formats have in common: named tensors that can be read one at a time into given memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from engine_worker.errors import LoadError
from engine_worker.layers.weights import WeightStore

__all__ = ["Checkpoint", "Progress", "TensorInfo", "fill", "fingerprint"]

Progress = Callable[[int, int, str], None]
"""(bytes read, bytes in all, what is being done)."""

_SAMPLE_BYTES = 1024
_DERIVED = ("rotary_emb.inv_freq", "rope_freqs.weight", "attn.masked_bias")
"""Ends of names of tensors that are computed from the configuration, not learned."""


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint, under its Hugging Face name."""

    shape: tuple[int, ...]
    kind: str
    """Stored type, e.g. "BF16" or "Q4_1"."""
    num_bytes: int


class Checkpoint(Protocol):
    """An open checkpoint."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, in the order of the file."""

    def read(self, name: str, destination: Tensor) -> None:
        """Writes the tensor into `destination`: its shape, any float dtype, any device; or uint8 [rows, bytes of a row
        of blocks] for a type in BLOCK_FORMATS."""

    def sample(self, name: str, size: int) -> bytes:
        """The first `size` stored bytes, or all of a smaller tensor."""


def fill(store: WeightStore, checkpoint: Checkpoint, progress: Progress, *, tied: bool) -> None:
    """Reads every tensor into its place, exactly once.

    A tensor the model lacks is an error, not ignored: it would be a different model. So is one that is missing.
    """
    total = sum(info.num_bytes for info in checkpoint.tensors.values())
    done = 0
    unexpected = []
    for name, info in checkpoint.tensors.items():
        progress(done, total, name)
        done += info.num_bytes
        if name not in store:
            if not name.endswith(_DERIVED) and not (tied and name == "lm_head.weight"):
                unexpected.append(name)
            continue
        if info.shape != store.shape(name):
            raise LoadError(
                f"The tensor {name!r} has shape {info.shape}; the configuration asks for {store.shape(name)}."
            )
        checkpoint.read(name, store.destination(name))
        store.written(name)
    if unexpected:
        raise LoadError(f"The checkpoint holds tensors this architecture does not have: {_some(unexpected)}.")
    missing = store.missing()
    if missing:
        raise LoadError(f"The checkpoint lacks tensors the model needs: {_some(missing)}.")
    progress(total, total, "weights")


def fingerprint(checkpoint: Checkpoint, *extra: str) -> str:
    """16 hex digits over names, shapes, types and the first bytes of every tensor, and `extra`; not over file paths."""
    digest = hashlib.sha256("\0".join(extra).encode())
    for name in sorted(checkpoint.tensors):
        digest.update(f"{name} {checkpoint.tensors[name]}".encode())
        digest.update(checkpoint.sample(name, _SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _some(names: list[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
