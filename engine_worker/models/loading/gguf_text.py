"""GGUF metadata -> tokenizer.json and the rest of a model's text assets.

Two vocabularies exist in practice: "gpt2" (byte-level BPE with a list of merges) and "llama" (SentencePiece BPE: scores
instead of merges, byte fallback, ▁ for spaces).
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from tokenizers import Tokenizer

from engine_worker.errors import LoadError
from engine_worker.models.loading.gguf_header import GgufHeader
from engine_worker.models.loading.pretokenizers import pre_tokenizer
from engine_worker.models.loading.text_assets import TextAssets

__all__ = ["text_from_gguf"]

_T = TypeVar("_T")
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TURN_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>"}
"""Control tokens that end a turn of a chat; files often name only the end of a text as EOS."""


def text_from_gguf(file: GgufHeader) -> TextAssets:
    """Raises LoadError where the file has no vocabulary of a known kind."""
    vocabulary = _Vocabulary(file)
    kind = vocabulary.get("model", str, "")
    if kind == "gpt2":
        pre = pre_tokenizer(vocabulary.get("pre", str, "default"))
        content, add_bos = _byte_level(vocabulary, pre.to_json(), pre.ignore_merges), pre.add_bos
    elif kind == "llama":
        content, add_bos = _sentence_piece(vocabulary), True
    else:
        raise LoadError(f"{file.path}: the tokenizer model {kind!r} is not supported (gpt2 and llama are).")
    template = file.metadata.get("tokenizer.chat_template", "")
    special = vocabulary.special_ids()
    return TextAssets(
        tokenizer_json=_checked(file, content),
        chat_template=template if isinstance(template, str) else "",
        special_tokens={name: vocabulary.tokens[index] for name, index in special.items()},
        add_bos="bos_token" in special and vocabulary.get("add_bos_token", bool, add_bos),
        eos_token_ids=vocabulary.eos_ids(),
    )


class _Vocabulary:
    """The tokenizer.ggml.* part of the metadata."""

    def __init__(self, file: GgufHeader) -> None:
        self._file = file
        self.tokens: list[str] = self.get("tokens", list, [])
        self.types: list[int] = self.get("token_type", list, [1] * len(self.tokens))
        if not self.tokens or len(self.types) != len(self.tokens):
            raise LoadError(f"{file.path} holds no usable vocabulary (tokenizer.ggml.tokens, token_type).")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise LoadError(f"{file.path}: some tokens of the vocabulary occur twice.")

    def get(self, name: str, kind: type[_T], default: _T) -> _T:
        value = self._file.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, kind):
            raise LoadError(f"{self._file.path}: tokenizer.ggml.{name} is not of type {kind.__name__}.")
        return value

    def token_id(self, name: str) -> int | None:
        index = self.get(f"{name}_token_id", int, -1)
        return index if 0 <= index < len(self.tokens) else None

    def special_ids(self) -> dict[str, int]:
        found = {name: self.token_id(key) for name, key in _SPECIAL_KEYS.items()}
        return {name: index for name, index in found.items() if index is not None}

    def eos_ids(self) -> tuple[int, ...]:
        named = {self.token_id(key) for key in ("eos", "eot", "eom")}
        ends = {self.ids[token] for token in _TURN_ENDS if token in self.ids}
        return tuple(sorted({i for i in named if i is not None} | {i for i in ends if self.types[i] == _CONTROL}))

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens matched as a whole before anything else; control tokens are special (left out of decoded text)."""
        return [
            {
                "id": index,
                "content": self.tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for index, kind in enumerate(self.types)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]


def _byte_level(vocabulary: _Vocabulary, pre: dict[str, Any], ignore_merges: bool) -> dict[str, Any]:
    merges: list[str] = vocabulary.get("merges", list, [])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = _bpe(vocabulary, [_split_merge(merge) for merge in merges]) | {"ignore_merges": ignore_merges}
    return _document(vocabulary, None, pre, byte_level, model)


def _sentence_piece(vocabulary: _Vocabulary) -> dict[str, Any]:
    scores: list[float] = vocabulary.get("scores", list, [])
    if len(scores) != len(vocabulary.tokens):
        raise LoadError("The vocabulary has no scores (tokenizer.ggml.scores).")
    prefix = vocabulary.get("add_space_prefix", bool, True)
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.token_id("unknown")
    model = _bpe(vocabulary, _merges_from_scores(vocabulary, scores)) | {
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "fuse_unk": True,
        "byte_fallback": True,
    }
    normalizer, decoder = {"type": "Sequence", "normalizers": steps}, {"type": "Sequence", "decoders": decoders}
    return _document(vocabulary, normalizer, None, decoder, model)


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best token first: the order in which SentencePiece would merge."""
    ids, found = vocabulary.ids, []
    for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right]))
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _document(
    vocabulary: _Vocabulary,
    normalizer: dict[str, Any] | None,
    pre: dict[str, Any] | None,
    decoder: dict[str, Any],
    model: dict[str, Any],
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": normalizer,
        "pre_tokenizer": pre,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _split_merge(merge: str) -> tuple[str, str]:
    # From index 1: the left half may itself be a space in vocabularies that are not byte-level.
    cut = merge.find(" ", 1)
    if cut < 0:
        raise LoadError(f"The merge {merge!r} of the vocabulary is not a pair.")
    return merge[:cut], merge[cut + 1 :]


def _checked(file: GgufHeader, content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    try:
        Tokenizer.from_str(text)
    except Exception as error:
        raise LoadError(f"{file.path}: no tokenizer can be made of its vocabulary: {error}") from error
    return text.encode()
