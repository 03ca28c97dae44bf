"""What a model declares of its parameters: names, sizes, and what they are used for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LinearSpec", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A small parameter used as it is, in float32: `name` in the checkpoint, e.g. "model.norm.weight"."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A matrix made of one or more of the checkpoint's, stacked along the output rows in this order."""

    name: str
    parts: tuple[tuple[str, int], ...]
    """(checkpoint name without ".weight", output rows)."""
    in_features: int
    bias: bool = False
    lookup: bool = False
    """An embedding: rows are read by number."""
    precise: bool = False
    """Every error in it meets every token (embedding, logits): 8 bits where the rest is quantized to 4."""

    @property
    def out_features(self) -> int:
        """Rows of all parts."""
        return sum(rows for _, rows in self.parts)

    def weights(self) -> list[str]:
        """Checkpoint names of the parts."""
        return [f"{part}.weight" for part, _ in self.parts]
