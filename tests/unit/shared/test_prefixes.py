"""Fingerprints: equal beginnings have equal ones, and the memory of a worker forgets as its cache does."""

from __future__ import annotations

import itertools
import random

import hypothesis.strategies as st
from hypothesis import given

from shared.prefixes import FIRST_LENGTH, PrefixMemory, fingerprints, unpack


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_marks_agree_exactly_as_far_as_the_tokens_do(shared: int, one: int, other: int) -> None:
    head = [i * 7 % 50_000 for i in range(shared)]
    a, b = fingerprints([*head, *[1] * one]), fingerprints([*head, *[2] * other])
    common = {length for (length, digest), (_, same) in zip(a, b, strict=False) if digest == same}
    assert common == {length for length, _ in a if length <= shared and length <= shared + other}


def test_few_marks_at_growing_lengths() -> None:
    lengths = [length for length, _ in fingerprints(range(131_072))]
    assert lengths[:3] == [FIRST_LENGTH, 2 * FIRST_LENGTH, 3 * FIRST_LENGTH]
    assert len(lengths) < 32
    assert all(after <= 2 * before for before, after in itertools.pairwise(lengths))
    assert fingerprints(range(FIRST_LENGTH - 1)) == []


def test_another_salt_shares_nothing() -> None:
    tokens = range(200)
    marks = {digest for _, digest in fingerprints(tokens)} & {digest for _, digest in fingerprints(tokens, "salt")}
    assert marks == set()


def marks_of(prompt: range, first: int = 99) -> set[bytes]:
    return {digest for _, digest in fingerprints(prompt)[:first]}


def test_memory_is_bounded_and_forgets_what_was_used_longest_ago_ends_first() -> None:
    memory = PrefixMemory(capacity=10 * FIRST_LENGTH)
    old, new = range(4 * FIRST_LENGTH), range(9, 9 + 8 * FIRST_LENGTH)
    memory.add(old)
    memory.add(new)
    assert unpack(memory.packed()) == marks_of(old, 2) | marks_of(new)
    memory.add(old)
    assert marks_of(old) <= unpack(memory.packed())
    assert len(memory) == 10


def test_what_has_no_fingerprint_takes_room_too() -> None:
    memory = PrefixMemory(capacity=10 * FIRST_LENGTH)
    old, tail, short = range(4 * FIRST_LENGTH), range(9, 9 + 3 * FIRST_LENGTH + 33), range(40)
    memory.add(old)
    for _ in range(3):  # the same tail is cached once
        memory.add(tail)
    assert unpack(memory.packed()) == marks_of(old) | marks_of(tail)
    memory.add_answer(2 * FIRST_LENGTH)
    assert unpack(memory.packed()) == marks_of(old) | marks_of(tail)
    memory.add(short)
    assert unpack(memory.packed()) == marks_of(old, 3) | marks_of(tail)
    memory.add_answer(3 * FIRST_LENGTH)
    assert unpack(memory.packed()) == marks_of(tail)
    for _ in range(2):  # its last 33 tokens go first
        memory.add_answer(FIRST_LENGTH)
    assert unpack(memory.packed()) == marks_of(tail, 2)
    assert len(memory) == 2
    for _ in range(20):
        memory.add_answer(FIRST_LENGTH)
    assert memory.packed() == b""


def test_one_publication_stays_small() -> None:
    memory, rng = PrefixMemory(capacity=1 << 40), random.Random(1)
    for _ in range(300):
        memory.add([rng.randrange(1000) for _ in range(2048)])
    assert len(memory.packed()) <= 32_768
    assert len(unpack(memory.packed())) == len(memory)
