"""Log-probabilities: exact bytes, nothing that is not part of the text."""

from __future__ import annotations

import msgspec
import pytest

from api_service.logprobs import CompletionLogprobs, Speller
from shared.messages import Delta, TokenLogprob
from tests.support import toy_tokenizers
from tests.support.scripted_worker import EOS_ID, token_ids
from tests.support.served import served

TOKEN_BYTES = served().vocabulary.token_bytes
SPELLER = Speller(TOKEN_BYTES, skip_special_tokens=True)


def delta(*ids: int, finish: str | None = None, stop: str | int | None = None, top: int = 0) -> Delta:
    lps = tuple(TokenLogprob(i, -1.0, tuple((other, -2.0) for other in range(10, 10 + top))) for i in ids)
    return Delta(token_ids=ids, logprobs=lps, finish_reason=finish, stop_reason=stop)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["Hello world", "日本語のテキスト", "🫠 emoji 👩‍👩‍👧", "Größe \u2028"])
def test_lgp_02_joined_bytes_are_the_text(text: str) -> None:
    items = SPELLER.chat(delta(*token_ids(text)))
    assert b"".join(bytes(item["bytes"]) for item in items).decode() == text
    for item in items:
        assert item["token"] == bytes(item["bytes"]).decode(errors="replace")


def test_lgp_02_part_of_a_character_shows_its_own_bytes() -> None:
    vocabulary = toy_tokenizers.byte_level()
    lead = vocabulary.token_to_id("ð")  # the byte F0
    [item] = SPELLER.chat(delta(lead))
    assert item["bytes"] == [0xF0]
    arrays = CompletionLogprobs(SPELLER, 0).arrays(delta(lead))
    assert arrays["tokens"] == ["bytes:\\xf0"]


def test_the_token_that_ends_a_choice_has_no_bytes() -> None:
    [hello, end] = SPELLER.chat(delta(10, EOS_ID, finish="stop"))
    assert (hello["bytes"], end["token"], end["bytes"]) == (list(TOKEN_BYTES.bytes_of(10)), "<|im_end|>", [])
    [custom] = SPELLER.chat(delta(10, finish="stop", stop=10))
    assert custom["bytes"] == []
    [before] = SPELLER.chat(msgspec.structs.replace(delta(10, finish="stop"), token_ids=(10, EOS_ID)))
    assert before["bytes"] != []  # the worker left the stop token's logprobs out
    [by_string] = SPELLER.chat(delta(10, finish="stop", stop="x"))
    assert by_string["bytes"] != []
    shown = Speller(TOKEN_BYTES, skip_special_tokens=False)
    assert bytes(shown.chat(delta(1))[0]["bytes"]) == b"<|im_start|>"


def test_alternatives_with_their_bytes() -> None:
    [item] = SPELLER.chat(delta(50, top=3))
    assert [bytes(top["bytes"]) for top in item["top_logprobs"]] == [TOKEN_BYTES.bytes_of(i) for i in (10, 11, 12)]
    assert SPELLER.chat(delta(50))[0]["top_logprobs"] == []  # LGP-10


def test_lgp_06_offsets_count_characters_over_deltas() -> None:
    text = "Hé 日 world"
    ids = token_ids(text)
    arrays = CompletionLogprobs(SPELLER, 2, offset=0)
    parts = [arrays.arrays(delta(*ids[:3], top=2)), arrays.arrays(delta(*ids[3:], top=2))]
    tokens = [token for part in parts for token in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)
    top = parts[0]["top_logprobs"][0]
    assert len(top) == 3  # the two best and the chosen one
    assert CompletionLogprobs(SPELLER, 0).arrays(delta(*ids))["top_logprobs"] is None
