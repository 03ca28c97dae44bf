"""Incremental decoding equals the tokenizers library's decode of all ids, however the ids arrive."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.text.detokenize import Detokenizer
from shared.text.token_bytes import TokenBytes
from tests.support import toy_tokenizers

BYTE_LEVEL = toy_tokenizers.byte_level()
BYTE_LEVEL_TOKENS = TokenBytes.from_tokenizer_json(BYTE_LEVEL.to_str().encode())
SENTENCEPIECE = [toy_tokenizers.llama2, toy_tokenizers.gemma, toy_tokenizers.metaspace, toy_tokenizers.unigram]


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes.from_tokenizer_json(tokenizer.to_str().encode())


def chunks(ids: list[int], rng: random.Random) -> list[list[int]]:
    cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(len(ids) + 2)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def test_rl_20_random_ids_in_every_chunking_join_to_the_full_decode():
    rng = random.Random(20)
    size = BYTE_LEVEL.get_vocab_size()
    pool = [*range(size), *BYTE_LEVEL.encode("日本語🫠龜 한국어 👩‍👩‍👧").ids * 8]
    for _ in range(10_000):
        ids = [rng.choice(pool) for _ in range(rng.randrange(12))]
        skip = rng.random() < 0.5
        detokenizer = Detokenizer(BYTE_LEVEL_TOKENS, skip)
        pieces = []
        for chunk in chunks(ids, rng):
            pieces.append(detokenizer.push(chunk))
            assert len(detokenizer.pending) <= 3
        pieces.append(detokenizer.flush())
        assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=30), st.integers(0, 30))
def test_rl_20_a_resume_at_any_position_goes_on_as_if_nothing_happened(ids, position):
    whole = Detokenizer(BYTE_LEVEL_TOKENS)
    before = whole.push(ids[:position])
    after = whole.push(ids[position:]) + whole.flush()
    replayed = Detokenizer(BYTE_LEVEL_TOKENS)
    assert "".join(replayed.push([i]) for i in ids[:position]) == before
    assert replayed.push(ids[position:]) + replayed.flush() == after


def test_rl_21_korean_syllables_cut_at_every_boundary_arrive_whole():
    text = "한국어 텍스트를 섞는다 日本語 🫠"
    ids = BYTE_LEVEL.encode(text).ids
    detokenizer = Detokenizer(BYTE_LEVEL_TOKENS)
    pieces = [detokenizer.push([i]) for i in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_det_02_an_unfinished_character_at_the_end_is_exactly_one_replacement(kept):
    ids = [BYTE_LEVEL.token_to_id(c) for c in "ðŁ«ł"[:kept]]  # the bytes F0 9F AB A0 of U+1FAE0
    detokenizer = Detokenizer(BYTE_LEVEL_TOKENS)
    assert detokenizer.push(ids) == ""
    assert detokenizer.pending == "\U0001fae0".encode()[:kept]
    assert detokenizer.flush() == "\ufffd" == BYTE_LEVEL.decode(ids)
    assert detokenizer.flush() == ""


def test_det_03_a_repeated_lead_byte_streams_replacements_and_holds_one_byte():
    lead = BYTE_LEVEL.token_to_id("ð")
    detokenizer = Detokenizer(BYTE_LEVEL_TOKENS)
    pieces = [detokenizer.push([lead]) for _ in range(64)]
    assert pieces == ["", *["\ufffd"] * 63]
    assert detokenizer.flush() == "\ufffd"


def test_det_03_a_literal_replacement_character_is_not_waited_for():
    ids = BYTE_LEVEL.encode("a\ufffdb").ids
    detokenizer = Detokenizer(BYTE_LEVEL_TOKENS)
    assert "".join(detokenizer.push([i]) for i in ids) == "a\ufffdb"


def test_det_05_whitespace_is_never_trimmed():
    ids = BYTE_LEVEL.encode("\n\n \t\n ").ids
    assert Detokenizer(BYTE_LEVEL_TOKENS).push(ids) == "\n\n \t\n "


def test_det_06_special_tokens_show_only_when_asked_for():
    ids = [1, BYTE_LEVEL.token_to_id("a"), 2]
    assert Detokenizer(BYTE_LEVEL_TOKENS).push(ids) == "a"
    assert Detokenizer(BYTE_LEVEL_TOKENS, skip_special_tokens=False).push(ids) == "<|im_start|>a<|im_end|>"


def test_a_skipped_special_token_inside_a_character_does_not_break_it():
    f0, rest = BYTE_LEVEL.token_to_id("ð"), [BYTE_LEVEL.token_to_id(c) for c in "Ł«ł"]
    assert Detokenizer(BYTE_LEVEL_TOKENS).push([f0, 2, *rest]) == "\U0001fae0"


@pytest.mark.parametrize("make", SENTENCEPIECE)
def test_sentencepiece_random_ids_equal_the_library(make):
    """Byte runs are made of whole characters here: the library spoils those next to a broken one (see Detokenizer)."""
    tokenizer = make()
    tokens = token_bytes(tokenizer)
    rng = random.Random(7)
    ordinary = [i for i in range(tokenizer.get_vocab_size()) if not 3 <= i < 259]
    for _ in range(3_000):
        ids: list[int] = []
        for _ in range(rng.randrange(10)):
            byte_run = [3 + byte for byte in rng.choice(["龜", "é", "🫠", "\n"]).encode()]
            ids += byte_run if rng.random() < 0.4 else [rng.choice(ordinary)]
        skip = rng.random() < 0.5
        detokenizer = Detokenizer(tokens, skip)
        text = "".join(detokenizer.push(chunk) for chunk in chunks(ids, rng)) + detokenizer.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_byte_fallback_replaces_only_what_is_broken():
    tokenizer = toy_tokenizers.gemma()
    detokenizer = Detokenizer(token_bytes(tokenizer))
    ids = [3 + byte for byte in "é".encode() + b"\xf0\x9f"] + [tokenizer.token_to_id("a")]
    assert detokenizer.push(ids) == "é\ufffda"


@pytest.mark.parametrize("make", [toy_tokenizers.llama2, toy_tokenizers.metaspace])
def test_a_completion_keeps_the_space_between_prompt_and_answer(make):
    tokenizer = make()
    tokens = token_bytes(tokenizer)
    prompt, answer = [tokenizer.token_to_id("\u2581Hello")], [tokenizer.token_to_id("\u2581world")]
    text = Detokenizer(tokens, continues=True).push(answer)
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + answer)
    assert Detokenizer(tokens).push(answer) == tokenizer.decode(answer) == "world"
