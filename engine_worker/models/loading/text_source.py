"""Only what a checkpoint says about text: tokenizer, template, special tokens. Reads no weights, needs no torch."""

from __future__ import annotations

from engine_worker.models.loading.gguf_header import GgufHeader
from engine_worker.models.loading.gguf_text import text_from_gguf
from engine_worker.models.loading.hf_text import read_json, text_from_hf
from engine_worker.models.loading.sources import resolve
from engine_worker.models.loading.text_assets import TextAssets

__all__ = ["load_text"]


def load_text(source: str) -> tuple[str, TextAssets]:
    """The model's own name and its text assets; `source` as for `loader.load`. Raises LoadError."""
    resolved = resolve(source)
    if resolved.is_gguf:
        return resolved.name, text_from_gguf(GgufHeader(resolved.path))
    return resolved.name, text_from_hf(resolved.path, read_json(resolved.path / "config.json"))
