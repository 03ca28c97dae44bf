"""Text assets of a Hugging Face directory, from the several places where such directories keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from engine_worker.errors import LoadError
from engine_worker.models.loading.hf_text import read_json, text_from_hf
from tests.support.tiny_model import CHAT_TEMPLATE, make_tiny_llama


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "model")


def update(directory: Path, name: str, **changes: Any) -> None:
    path = directory / name
    path.write_text(json.dumps({k: v for k, v in (read_json(path) | changes).items() if v is not None}))


def test_tokenizer_json_is_handed_on_as_it_is(directory: Path) -> None:
    text = text_from_hf(directory, {})
    assert text.tokenizer_json == (directory / "tokenizer.json").read_bytes()
    assert text.chat_template == CHAT_TEMPLATE
    expected = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    assert text.special_tokens == expected
    assert text.add_bos is False


def test_the_template_file_wins_over_the_configuration(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ 'file' }}")
    assert text_from_hf(directory, {}).chat_template == "{{ 'file' }}"


def test_of_several_templates_the_default_is_taken(directory: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    update(directory, "tokenizer_config.json", chat_template=templates)
    assert text_from_hf(directory, {}).chat_template == "D"


def test_no_template_is_an_empty_one(directory: Path) -> None:
    update(directory, "tokenizer_config.json", chat_template=None)
    assert text_from_hf(directory, {}).chat_template == ""


def test_special_tokens_may_be_objects(directory: Path) -> None:
    update(directory, "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "lstrip": False})
    assert text_from_hf(directory, {}).special_tokens["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 1}, (2,)),
        ({"eos_token_id": [5, 2, 5]}, {"eos_token_id": 1}, (2, 5)),
        ({"eos_token_id": None}, {"eos_token_id": [1, 0]}, (0, 1)),
        ({"eos_token_id": None}, {}, (2,)),
    ],
    ids=["one", "list", "config", "token"],
)
def test_where_eos_is_named(
    directory: Path, generation: dict[str, Any], config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    update(directory, "generation_config.json", **generation)
    assert text_from_hf(directory, config).eos_token_ids == ids


def test_generation_defaults(directory: Path) -> None:
    update(directory, "generation_config.json", do_sample=True, temperature=0.6, top_p=0.9, top_k=20, max_length=4096)
    assert text_from_hf(directory, {}).defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0}


def test_add_bos_follows_the_post_processor_unless_the_configuration_says_otherwise(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    assert text_from_hf(directory, {}).add_bos is True
    update(directory, "tokenizer_config.json", add_bos_token=False)
    assert text_from_hf(directory, {}).add_bos is False


def test_missing_and_damaged_files_are_named(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(LoadError, match=r"generation_config\.json is damaged"):
        text_from_hf(directory, {})
    (directory / "generation_config.json").write_text("[]")
    with pytest.raises(LoadError, match="does not hold a JSON object"):
        text_from_hf(directory, {})
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json is damaged"):
        text_from_hf(directory, {})
    (directory / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match=r"holds no tokenizer\.json"):
        text_from_hf(directory, {})
