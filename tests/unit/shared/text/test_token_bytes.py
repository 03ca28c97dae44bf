"""Bytes of single tokens, against the tokenizers library."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from shared.text.token_bytes import TokenBytes
from tests.support import toy_tokenizers


def table_of(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes.from_tokenizer_json(tokenizer.to_str().encode())


@pytest.mark.parametrize("make", [toy_tokenizers.byte_level, toy_tokenizers.gemma, toy_tokenizers.unigram])
def test_every_token_reads_as_the_library_decodes_it(make):
    tokenizer = make()
    tokens = table_of(tokenizer)
    for token_id in range(tokenizer.get_vocab_size()):
        expected = tokenizer.decode([token_id], skip_special_tokens=False)
        assert tokens.bytes_of(token_id).decode("utf-8", "replace") == expected


def test_byte_level_tokens_are_exact_bytes():
    tokenizer = toy_tokenizers.byte_level()
    tokens = table_of(tokenizer)
    text = "龜🫠 é\x00"
    assert b"".join(map(tokens.bytes_of, tokenizer.encode(text).ids)) == text.encode()


def test_special_tokens_are_known_and_ordinary_added_tokens_are_not_special():
    tokenizer = toy_tokenizers.byte_level()
    assert table_of(tokenizer).special == {0, 1, 2}


def test_an_unknown_id_has_no_bytes():
    tokens = table_of(toy_tokenizers.byte_level())
    assert tokens.bytes_of(-1) == b""
    assert tokens.bytes_of(10**9) == b""


def test_a_decoder_that_cannot_stream_is_refused_by_name():
    document = json.loads(toy_tokenizers.byte_level().to_str())
    document["decoder"] = {"type": "CTC"}
    with pytest.raises(ValueError, match="'CTC' is not supported"):
        TokenBytes.from_tokenizer_json(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"model": {"vocab": 3}}', b'{"model": {"vocab": {}}}'])
def test_a_file_that_is_no_tokenizer_is_refused(data):
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        TokenBytes.from_tokenizer_json(data)
