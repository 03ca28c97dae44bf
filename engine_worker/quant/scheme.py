"""Which matrix is kept how: what the user asked for, what the checkpoint holds, what the kernels can multiply.

In: `--quantization`, the stored type of every tensor. Out: a `Storage` for each linear layer. Decides only; the weight
store and the checkpoints act on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from engine_worker.errors import LoadError
from engine_worker.quant.blocks import BLOCK_FORMATS, can_rewrite

__all__ = ["QUANTIZATIONS", "Scheme", "Storage", "make_scheme"]

QUANTIZATIONS = ("auto", "none", "gguf", "int8", "q8_0", "q4_0", "q4_1")
"""Values of `--quantization`; docs/quantization.md says what each does."""

_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_WIDTH = ("q4_0", "q4_1", "q8_0")
"""Block formats from the narrowest to the widest."""


class Storage(NamedTuple):
    """How one matrix is kept."""

    format: str = ""
    """A quantized format of the kernels; "" is the model's dtype."""
    blocks: bool = False
    """Its parts arrive as GGUF blocks of `format`, not as numbers."""
    staging: torch.dtype | None = None
    """Type that parts are expanded to before they are quantized to `format`; None: the model's dtype."""


class Scheme(NamedTuple):
    """The decision for a whole checkpoint."""

    quantization: str
    """none, gguf, or a format of the kernels."""
    kinds: Mapping[str, str]
    """Stored type of every checkpoint tensor."""
    note: str = ""
    """Why the weights are not kept as asked for or as the file holds them; "" where they are."""

    def storage(self, tensors: Sequence[str], *, precise: bool) -> Storage:
        """For the matrix made of these checkpoint tensors. `precise` ones (embedding, logits) never take 4 bits by
        choice, only where the file has them so."""
        kinds = [self.kinds.get(name, "F32") for name in tensors]
        if self.quantization == "none":
            return Storage()
        if self.quantization == "gguf":
            return _as_stored(kinds)
        wanted = "q8_0" if precise and self.quantization.startswith("q4") else self.quantization
        if all(can_rewrite(kind, wanted) for kind in kinds):
            return Storage(wanted, blocks=True)
        return Storage(wanted, staging=torch.bfloat16 if set(kinds) == {"BF16"} else torch.float32)


def make_scheme(
    requested: str, dtype: torch.dtype, kinds: Mapping[str, str], formats: frozenset[str], reason: str = ""
) -> Scheme:
    """`formats`: what the kernels have, empty for none; `reason`: why they have none. Raises LoadError for a bad or
    impossible request."""
    if requested not in QUANTIZATIONS:
        raise LoadError(f"The quantization {requested!r} is unknown. Allowed: {', '.join(QUANTIZATIONS)}.")
    quantized = any(kind not in _PLAIN for kind in kinds.values())
    if requested == "gguf" and not quantized:
        raise LoadError(
            "quantization is gguf, but the checkpoint holds no quantised weights. Allowed: auto, none, int8, …"
        )
    wanted = requested
    if requested == "auto":
        wanted = "gguf" if quantized and dtype is torch.bfloat16 else "none"
    if wanted == "none":
        return Scheme("none", kinds)
    if dtype not in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise LoadError(f"--quantization {requested} and --dtype {name} exclude each other: take bfloat16 or float32.")
    if formats:
        return Scheme(wanted, kinds)
    if requested == "auto":
        return Scheme("none", kinds, "PyTorch's kernels multiply no quantised weights, so all are kept in full")
    reason = reason or "HEADRACE_CPU_BACKEND is torch, or the device is not a CPU"
    raise LoadError(
        f"--quantization {requested} needs Headrace's compiled CPU kernels, which do not serve here: {reason}. "
        "Without them: --quantization none."
    )


def _as_stored(kinds: Sequence[str]) -> Storage:
    """All parts take the widest of their formats, and types the kernels do not have take q8_0; a part in plain floats
    keeps the whole matrix so."""
    if any(kind in _PLAIN for kind in kinds):
        return Storage()
    formats = [BLOCK_FORMATS.get(kind, "q8_0") for kind in kinds]
    widest = max(formats, key=_WIDTH.index)
    blocks = all(can_rewrite(kind, widest) for kind in kinds)
    return Storage(widest, blocks=True) if blocks else Storage(widest, staging=torch.float32)
