"""tokenizer.json, chat template, special tokens and generation defaults of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine_worker.errors import LoadError
from engine_worker.models.loading.text_assets import TextAssets

__all__ = ["read_json", "text_from_hf"]

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def text_from_hf(directory: Path, config: dict[str, Any]) -> TextAssets:
    """`config` is the parsed config.json: it names EOS where generation_config.json does not. Raises LoadError."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise LoadError(f"{directory} holds no tokenizer.json (a tokenizer.model alone must be converted first).")
    data = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:
        raise LoadError(f"{path} is damaged: {error}") from error
    settings = read_json(directory / "tokenizer_config.json")
    generation = read_json(directory / "generation_config.json")
    special = _special_tokens(directory, settings)
    return TextAssets(
        tokenizer_json=data,
        chat_template=_chat_template(directory, settings),
        special_tokens=special,
        add_bos=_adds_bos(tokenizer, settings, special.get("bos_token")),
        eos_token_ids=_eos_ids(tokenizer, generation, config, special.get("eos_token")),
        defaults=_defaults(generation),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file, {} where there is no such file. Raises LoadError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} does not hold a JSON object.")
    return value


def _chat_template(directory: Path, settings: dict[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = settings.get("chat_template") or read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default") or next(iter(named.values()), "")
    return template if isinstance(template, str) else ""


def _special_tokens(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    found = {}
    for source in (read_json(directory / "special_tokens_map.json"), settings):
        for name in _SPECIAL:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _adds_bos(tokenizer: Tokenizer, settings: dict[str, Any], bos: str | None) -> bool:
    """The explicit setting where there is one, else what the tokenizer's own post-processor does."""
    if bos is None:
        return False
    explicit = settings.get("add_bos_token")
    if isinstance(explicit, bool):
        return explicit
    return tokenizer.encode("").tokens[:1] == [bos]


def _eos_ids(
    tokenizer: Tokenizer, generation: dict[str, Any], config: dict[str, Any], eos: str | None
) -> tuple[int, ...]:
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids = [value] if isinstance(value, int) else value
        if isinstance(ids, list) and ids and all(isinstance(index, int) for index in ids):
            return tuple(sorted(set(ids)))
    index = tokenizer.token_to_id(eos) if eos else None
    return () if index is None else (index,)


def _defaults(generation: dict[str, Any]) -> dict[str, float]:
    found = {name: generation.get(name) for name in _DEFAULTS}
    return {name: float(v) for name, v in found.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
