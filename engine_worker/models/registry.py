"""Architecture name (config.json's `architectures[0]`) -> the class that computes it."""

from __future__ import annotations

from collections.abc import Mapping

from engine_worker.errors import LoadError
from engine_worker.models.llama import Llama

__all__ = ["ARCHITECTURES", "model_class"]

ARCHITECTURES: Mapping[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
}


def model_class(architecture: str) -> type[Llama]:
    """Raises LoadError for an architecture this engine does not have."""
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise LoadError(f"The architecture {architecture!r} is not supported. Supported: {known}.")
    return ARCHITECTURES[architecture]
