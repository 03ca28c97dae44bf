"""Made-up tokens: which they may be, and that they depend on what they should and on nothing else."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter

import pytest

from engine_worker.simulate.tokens import TokenSource, ordinary_tokens
from engine_worker.simulate.vocabulary import built_in_text
from shared.text.detokenize import Detokenizer
from shared.text.token_bytes import TokenBytes
from tests.support import toy_tokenizers

TABLE = TokenBytes.from_tokenizer_json(toy_tokenizers.byte_level().to_str().encode())
WORDS = ordinary_tokens(TABLE)


def answer(source: TokenSource, prompt: list[int], seed: int | None, count: int = 50) -> list[int]:
    key = source.key(prompt, seed)
    return [source.token(key, position) for position in range(count)]


def test_ordinary_tokens_are_whole_printable_text() -> None:
    assert len(WORDS) > 50
    for token in WORDS:
        assert token not in TABLE.special
        assert TABLE.bytes_of(token).decode().isprintable()
    joined = b"".join(map(TABLE.bytes_of, WORDS)).decode()
    assert Detokenizer(TABLE).push(WORDS) == joined


def test_a_vocabulary_without_ordinary_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no ordinary tokens"):
        ordinary_tokens(TokenBytes(table=(b"\xff", b"", b"\n", b"<s>"), special=frozenset({3}), first={}))


def test_tokens_depend_on_seed_prompt_and_position_alone() -> None:
    source = TokenSource(WORDS, seed=1)
    first = answer(source, [1, 2, 3], 7)
    assert first == answer(TokenSource(WORDS, seed=1), [1, 2, 3], 7)
    others = [
        answer(TokenSource(WORDS, seed=2), [1, 2, 3], 7),
        answer(source, [1, 2, 4], 7),
        answer(source, [1, 2], 7),
        answer(source, [1, 2, 3], 8),
        answer(source, [1, 2, 3], None),
    ]
    for other in others:  # equal in a place or two by chance, not more
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 5


def test_the_numbers_are_splitmix64s() -> None:
    """Computed here once more, with the generator's state carried along instead of worked out from the position."""
    source = TokenSource(range(1 << 16), seed=3)
    head = b"3/7/" + b"".join(token.to_bytes(8, "little") for token in (5, 6))
    state = int.from_bytes(hashlib.blake2b(head, digest_size=8).digest(), "little")
    expected = []
    for _ in range(20):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        expected.append((z ^ (z >> 31)) % (1 << 16))
    assert answer(source, [5, 6], 7, 20) == expected


def test_all_of_the_vocabulary_is_used_and_neighbours_differ() -> None:
    tokens = answer(TokenSource(WORDS, seed=0), [1], 1, 100 * len(WORDS))
    counts = Counter(tokens)
    assert set(counts) == set(WORDS)
    assert max(counts.values()) < 200
    assert sum(a == b for a, b in itertools.pairwise(tokens)) < 300


def test_lengths_lie_around_the_mean() -> None:
    source = TokenSource(WORDS, seed=0)
    lengths = [source.length(source.key([i], 0), 100) for i in range(2000)]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert 95 < sum(lengths) / len(lengths) < 105
    assert {source.length(source.key([i], 0), 1) for i in range(100)} <= {1, 2}


def test_the_built_in_vocabulary_takes_any_prompt_and_says_words() -> None:
    text = built_in_text()
    table = TokenBytes.from_tokenizer_json(text.tokenizer_json)
    assert len(table.table) == 515
    words = [table.bytes_of(token) for token in ordinary_tokens(table)]
    assert b" bade" in words
    assert all(token in table.special for token in text.eos_token_ids)
