"""Stop strings: never visible, found at every alignment, and nothing else withheld."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text.stop import StopMatcher

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule spelt out on the whole text: first complete, then longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    shown = ""
    for piece in pieces:
        emit, stop = matcher.push(piece)
        shown += emit
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def cut(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(LETTERS, STOPS, st.booleans(), st.integers(0, 9))
def test_rl_22_any_cutting_gives_the_whole_texts_result(text, stops, include, seed):
    assert run(cut(text, seed), stops, include) == reference(text, stops, include)


@given(LETTERS, STOPS)
def test_stp_09_only_a_proper_prefix_of_a_stop_is_withheld(text, stops):
    matcher = StopMatcher(stops)
    seen = shown = ""
    for char in text:
        emit, stop = matcher.push(char)
        seen, shown = seen + char, shown + emit
        if stop is not None:
            return
        held = seen[len(shown) :]
        longest = max((k for s in stops for k in range(len(s)) if seen.endswith(s[:k])), default=0)
        assert seen == shown + held
        assert len(held) == longest


def test_rl_22_stops_of_1_to_12_characters_at_all_alignments():
    text = "abc de fghi jklmnop qrs"
    for length in range(1, 13):
        for start in range(len(text) - length + 1):
            stop = text[start : start + length]
            expected = text[: text.find(stop)]
            for size in range(1, 6):
                pieces = [text[i : i + size] for i in range(0, len(text), size)]
                assert run(pieces, [stop], False) == (expected, stop)


def test_stp_01_the_first_part_of_a_stop_is_not_shown_before_it_completes():
    matcher = StopMatcher(["rld wo"])
    assert [matcher.push(piece) for piece in (" world", " world")] == [(" wo", None), ("", "rld wo")]


def test_stp_02_rl_23_a_withheld_tail_is_flushed_when_the_choice_ends_otherwise():
    assert run([" world"] * 3, ["world!!!"], False) == (" world world world", None)
    text = "the zz end zz"
    for tokens in range(1, len(text) + 1):
        assert run(list(text[:tokens]), ["zzz"], False) == (text[:tokens], None)


def test_stp_08_the_stop_is_part_of_the_text_when_asked_for():
    assert run([" world", " world"], ["rld wo"], True) == (" world wo", "rld wo")


def test_stp_09_a_stop_that_never_matches_delays_nothing():
    matcher = StopMatcher(["Q" * 200])
    assert [matcher.push(word)[0] for word in ("Once ", "upon ", "a Q", "ueen")] == ["Once ", "upon ", "a ", "Queen"]


def test_no_stops_pass_everything_through():
    matcher = StopMatcher([])
    assert matcher.push("any text") == ("any text", None)
    assert matcher.flush() == ""


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
