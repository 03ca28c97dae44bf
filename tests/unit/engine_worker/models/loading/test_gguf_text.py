"""Tokenizers made from GGUF metadata: known ids of the default model, and llama.cpp's own tokenizer as oracle."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine_worker.errors import LoadError
from engine_worker.models.loading.gguf_file import GgufFile
from engine_worker.models.loading.gguf_text import text_from_gguf
from engine_worker.models.loading.pretokenizers import pre_tokenizer
from engine_worker.models.loading.text_assets import TextAssets
from tests.support.gguf_model import make_tiny_gguf, write_gguf
from tests.support.llama_oracle import default_gguf
from tests.support.tiny_model import tiny_tokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "line\nbreak\n\n\nend\n",
    "tab\tand\r\nwindows",
    "It's we'll THEY'RE i'd",
    "1234567 3.14 1,000 ²",
    "日本語 und größer, naïve café",
    "🫠🫠 family 👨‍👩‍👧 \u2028 \u00a0",
    "!!! ... --- ///",
    "a" * 50,
    "def f(x):\n    return x**2  # done",
]


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
def test_the_default_tokenizer_equals_llama_cpps() -> None:
    oracle = llama_cpp_tokenizer(default_gguf())
    tokenizer = Tokenizer.from_str(text_from_gguf(GgufFile(default_gguf())).tokenizer_json.decode())
    for text in [*TEXTS, *random_texts(40)]:
        assert tokenizer.encode(text).ids == oracle(text), text


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["gpt-2", "default", "llama-bpe", "qwen2", "smollm", "starcoder", "tekken"])
def test_every_pre_tokenizer_cuts_like_llama_cpp(tmp_path: Path, name: str) -> None:
    """The default model's merges under another model's cutting rule."""
    path = tmp_path / "vocabulary.gguf"
    source = GgufFile(default_gguf()).metadata
    write_gguf(
        path,
        {k: v for k, v in source.items() if not k.startswith("general")}
        | {"tokenizer.ggml.pre": name, "general.architecture": "llama"},
        {},
    )
    oracle = llama_cpp_tokenizer(path)
    tokenizer = Tokenizer.from_str(text_from_gguf(GgufFile(path)).tokenizer_json.decode())
    for text in [*TEXTS, *random_texts(40)]:
        assert tokenizer.encode(text).ids == oracle(text), text


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: three control tokens, all bytes, and pieces of a few words, longest best."""
    pieces = ["▁", "▁the", "▁world", "▁hello", "hello", "he", "ll", "llo", "o", "h", "e", "l", "t", "th", "the", "▁t"]
    pieces += ["▁th", "▁w", "w", "r", "d", "or", "orld", "ld", "▁h", "▁he", "▁hell", "1", "2", "\n", "é", "日", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [float(-number) for number in range(len(pieces))]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.block_count": 1,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentence_piece_vocabulary_tokenizes_like_llama_cpp(tmp_path: Path, prefix: bool) -> None:
    path = tmp_path / "spm.gguf"
    write_gguf(path, spm_metadata(**{"tokenizer.ggml.add_space_prefix": prefix}), {})
    text = text_from_gguf(GgufFile(path))
    tokenizer = Tokenizer.from_str(text.tokenizer_json.decode())
    oracle = llama_cpp_tokenizer(path)
    for sample in ["hello world", " the  world", "the\nworld", "é日本 12", "🫠", "hell o"]:
        ids = tokenizer.encode(sample).ids
        assert ids == oracle(sample), sample
        assert tokenizer.decode(ids) == sample
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


def llama_cpp_tokenizer(path: Path) -> Any:
    """text -> ids by llama.cpp, without BOS and with special tokens as plain text."""
    llama_cpp = pytest.importorskip("llama_cpp", exc_type=ImportError)
    # The package opens /dev/null when imported and never closes it.
    atexit.register(llama_cpp._utils.outnull_file.close)
    atexit.register(llama_cpp._utils.errnull_file.close)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return lambda text: model.tokenize(text.encode(), add_bos=False, special=False) if text else []


def random_texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    alphabet = list("abcXYZ  \n\t'.,!?-_(){}0123456789éßñ日本語🫠\u00a0\u3000")
    return ["".join(rng.choice(alphabet, size=rng.integers(1, 40))) for _ in range(count)]
