"""Tokenizers made from GGUF metadata: known ids of the default model, and what llama.cpp's own tokenizer says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine_worker.errors import LoadError
from engine_worker.models.loading.gguf_file import GgufFile
from engine_worker.models.loading.gguf_text import text_from_gguf
from engine_worker.models.loading.pretokenizers import pre_tokenizer
from engine_worker.models.loading.text_assets import TextAssets
from tests.support.gguf_model import make_tiny_gguf, write_gguf
from tests.support.llama_cpp_tokens import PRE_TOKENIZERS, TEXTS, recorded, spm_metadata, write_default_vocabulary
from tests.support.llama_oracle import default_gguf
from tests.support.tiny_model import tiny_tokenizer


@pytest.fixture(scope="module")
def default_text() -> TextAssets:
    return text_from_gguf(GgufFile(default_gguf()))


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (" the", [260]),
        (" world", [905]),
        ("A", [49]),
        ("\n", [198]),
        ("\n\n", [1116]),
        (" ", [216]),
        ("aaaa", [46880]),
        ("\U0001fae0", [10813, 121, 250]),
        ("\u65e5", [23274, 115]),
        ("\u9f9c", [180, 139, 246]),
        ("\u2028", [321, 118]),
        ("", []),
        ("12", [33, 34]),
        ("<|im_end|>", [2]),
    ],
)
def test_known_ids_of_the_default_model(default_text: TextAssets, text: str, ids: list[int]) -> None:
    tokenizer = Tokenizer.from_str(default_text.tokenizer_json.decode())
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.real_model
def test_text_assets_of_the_default_model(default_text: TextAssets) -> None:
    tokenizer = Tokenizer.from_str(default_text.tokenizer_json.decode())
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special == set(range(17))
    assert tokenizer.get_vocab_size() == 49152
    assert default_text.eos_token_ids == (2,)
    assert default_text.add_bos is False
    assert default_text.special_tokens["eos_token"] == "<|im_end|>"
    assert default_text.chat_template.startswith("{% for message in messages %}")


@pytest.mark.real_model
def test_the_default_tokenizer_equals_llama_cpps(default_text: TextAssets) -> None:
    tokenizer = Tokenizer.from_str(default_text.tokenizer_json.decode())
    oracle = recorded("default model")
    assert len(oracle) > 40
    assert {text: tokenizer.encode(text).ids for text in oracle} == oracle


@pytest.mark.real_model
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_cuts_like_llama_cpp(tmp_path: Path, name: str) -> None:
    path = tmp_path / "vocabulary.gguf"
    write_default_vocabulary(path, name)
    tokenizer = Tokenizer.from_str(text_from_gguf(GgufFile(path)).tokenizer_json.decode())
    oracle = recorded(name)
    assert len(oracle) > 40
    assert {text: tokenizer.encode(text).ids for text in oracle} == oracle


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentence_piece_vocabulary_tokenizes_like_llama_cpp(tmp_path: Path, prefix: bool) -> None:
    path = tmp_path / "spm.gguf"
    write_gguf(path, spm_metadata(**{"tokenizer.ggml.add_space_prefix": prefix}), {})
    text = text_from_gguf(GgufFile(path))
    tokenizer = Tokenizer.from_str(text.tokenizer_json.decode())
    oracle = recorded(f"spm, prefix {prefix}")
    assert {sample: tokenizer.encode(sample).ids for sample in oracle} == oracle
    for sample, ids in oracle.items():
        assert tokenizer.decode(ids, skip_special_tokens=False) == sample
    assert text.add_bos is True
    assert text.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert text.eos_token_ids == (2,)


def test_a_tiny_file_tokenizes_like_the_tokenizer_it_was_made_from(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(path, metadata={"tokenizer.chat_template": "{{ 1 }}"})
    text = text_from_gguf(GgufFile(path))
    tokenizer, source = Tokenizer.from_str(text.tokenizer_json.decode()), tiny_tokenizer()
    for sample in [*TEXTS, "<|im_start|>user\nhi<|im_end|>"]:
        assert tokenizer.encode(sample).ids == source.encode(sample).ids
        assert tokenizer.decode(source.encode(sample).ids) == source.decode(source.encode(sample).ids)
    assert text.chat_template == "{{ 1 }}"


def test_eos_ids_include_turn_ends_that_are_control_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(path, metadata={"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5})
    assert text_from_gguf(GgufFile(path)).eos_token_ids == (0, 2, 5)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "no usable vocabulary"),
        ({"tokenizer.ggml.tokens": ["a"] * 320}, "occur twice"),
        ({"tokenizer.ggml.merges": ["ab"]}, "not a pair"),
        ({"tokenizer.ggml.merges": ["no such"]}, "no tokenizer can be made"),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
    ],
)
def test_unusable_vocabularies_are_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(path, metadata=metadata)
    with pytest.raises(LoadError, match=message):
        text_from_gguf(GgufFile(path))


def test_whole_tokens_win_over_merges_where_the_model_says_so() -> None:
    assert pre_tokenizer("llama-bpe").ignore_merges
    assert not pre_tokenizer("gpt-2").ignore_merges
