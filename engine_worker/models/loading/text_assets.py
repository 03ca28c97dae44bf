"""What a checkpoint says about text: tokenizer, template, special tokens, defaults. The same nouns for both formats."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["TextAssets"]


@dataclass(frozen=True, slots=True)
class TextAssets:
    """See the fields of the same names of `LoadedModel`."""

    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    add_bos: bool
    eos_token_ids: tuple[int, ...]
    defaults: dict[str, float] = field(default_factory=dict)
