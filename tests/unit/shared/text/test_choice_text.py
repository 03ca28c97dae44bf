"""Detokenizer and stop matcher together: what a client of one choice sees."""

from __future__ import annotations

import random

from shared.params import StopConditions
from shared.text.choice_text import ChoiceText
from shared.text.token_bytes import TokenBytes
from tests.support import toy_tokenizers

TOKENIZER = toy_tokenizers.byte_level()
TOKENS = TokenBytes.from_tokenizer_json(TOKENIZER.to_str().encode())


def stop_at(*stops: str, include: bool = False) -> StopConditions:
    return StopConditions(max_tokens=99, stop=stops, include_stop_str_in_output=include)


def run(ids: list[int], conditions: StopConditions) -> tuple[str, str | None, int]:
    """(text, stop, tokens used)."""
    choice = ChoiceText(TOKENS, conditions)
    text = ""
    for used, token_id in enumerate(ids, 1):
        piece, stop = choice.push(token_id)
        text += piece
        if stop is not None:
            return text, stop, used
    return text + choice.finish(), choice.stop, len(ids)


def test_rl_22_stops_made_of_a_text_at_all_token_alignments():
    text = "日本語 world 🫠🫠 world, naïve"
    ids = TOKENIZER.encode(text).ids
    for start in range(len(text)):
        for length in range(1, 13):
            stop = text[start : start + length]
            shown, matched, used = run(ids, stop_at(stop))
            assert (shown, matched) == (text[: text.find(stop)], stop)
            assert stop in TOKENIZER.decode(ids[:used])
            assert stop not in TOKENIZER.decode(ids[: used - 1])


def test_rl_23_a_stop_never_completed_costs_no_text():
    ids = TOKENIZER.encode("a zz zz 龜").ids
    for count in range(len(ids) + 1):
        assert run(ids[:count], stop_at("zzz"))[0] == TOKENIZER.decode(ids[:count])


def test_rl_21_a_cut_inside_an_emoji_leaves_one_replacement_after_the_held_text():
    ids = [*TOKENIZER.encode("zz").ids, TOKENIZER.token_to_id("ð")]
    assert run(ids, stop_at("zz\U0001fae0"))[0] == "zz\ufffd"


def test_tokens_after_the_stop_change_nothing():
    choice = ChoiceText(TOKENS, stop_at("b"))
    a, b = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
    assert choice.push(a) == ("a", None)
    assert choice.push(b) == ("", "b")
    assert choice.push(a) == ("", "b")
    assert choice.finish() == ""


def test_a_replay_from_ids_reaches_the_same_state_at_every_position():
    rng = random.Random(3)
    ids = TOKENIZER.encode("world wor🫠ld 日本 world!").ids
    conditions = stop_at("ld 日本x", "🫠lx")
    expected = [*map(ChoiceText(TOKENS, conditions).push, ids)]
    for _ in range(50):
        position = rng.randrange(len(ids))
        replayed = ChoiceText(TOKENS, conditions)
        for token_id in ids[:position]:
            replayed.push(token_id)
        assert [*map(replayed.push, ids[position:])] == expected[position:]
