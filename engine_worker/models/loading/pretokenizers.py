"""How text is cut before byte-pair merging, by the name a GGUF file gives it (`tokenizer.ggml.pre`).

The patterns are those of the models' own tokenizer.json files; which names share one follows llama.cpp's vocabulary
code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_worker.errors import LoadError

__all__ = ["PreTokenizer", "pre_tokenizer"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns applied one after the other, each cutting what the one before left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a piece that is a whole token is taken as it is, without merging."""
    add_bos: bool = False
    """What holds when the file does not say."""

    def to_json(self) -> dict[str, Any]:
        """The `pre_tokenizer` of a tokenizer.json, byte-level at the end."""
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
        return {"type": "Sequence", "pretokenizers": steps}


_DEFAULT = PreTokenizer((_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_BY_NAME: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "olmo": _PLAIN,
    "mpt": _PLAIN,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
    "falcon3": _LLAMA,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "megrez": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Raises LoadError for a name that is not known: a wrong cut gives wrong token ids without any sign of it."""
    if name not in _BY_NAME:
        raise LoadError(f"The pre-tokenizer {name!r} is not supported. Supported: {', '.join(sorted(_BY_NAME))}.")
    return _BY_NAME[name]
