"""Log-probabilities: exact bytes, nothing that is not part of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from api_service.logprobs import CompletionLogprobs, Speller
from shared.messages import Delta, PromptLogprob, TokenLogprob
from shared.params import SamplingParams
from tests.support import toy_tokenizers
from tests.support.records import make_request
from tests.support.scripted_worker import EOS_ID, token_ids
from tests.support.served import served

TOKEN_BYTES = served().vocabulary.token_bytes
SPELLER = Speller(TOKEN_BYTES, skip_special_tokens=True)


def arrays_of(alternatives: int, **fields: Any) -> CompletionLogprobs:
    sampling = SamplingParams(logprobs=alternatives, prompt_logprobs=alternatives)
    return CompletionLogprobs(SPELLER, make_request(kind="completion", sampling=sampling, **fields), 0)


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
    arrays = arrays_of(0).arrays(delta(lead))
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
    arrays = arrays_of(2)
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
    assert arrays_of(0).arrays(delta(*ids))["top_logprobs"] is None


def scores(ids: Sequence[int]) -> tuple[PromptLogprob, ...]:
    return tuple(PromptLogprob(i, -0.5, 4, ((10, -0.1), (11, -0.2), (12, -0.3))) for i in ids)


@pytest.mark.parametrize("text", ["Hello", "日本 x", "日"])
def test_lgp_06_08_an_echoed_prompt_comes_first_with_its_offsets(text: str) -> None:
    """However the scores are cut into deltas: one entry a token, null for the first, offsets over prompt and answer."""
    ids, more = token_ids(text), token_ids(" wörld")
    whole = None
    for cut in range(len(ids)):
        arrays = arrays_of(2, prompts=(tuple(ids),), echo=(text,))
        parts = [Delta(prompt=scores(ids[1:][:cut])), Delta(prompt=scores(ids[1:][cut:])), delta(*more, top=2)]
        told = [arrays.arrays(part) for part in parts]
        joined = {key: [item for part in told for item in part[key]] for key in told[0]}
        assert "".join(b"".join(map(as_bytes, joined["tokens"])).decode()) == text + " wörld"
        assert joined["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1) + [-1.0] * len(more)
        assert joined["top_logprobs"][0] is None
        assert joined["text_offset"][0] == 0
        assert joined["text_offset"][len(ids)] == len(text)
        assert whole is None or joined == whole
        whole = joined


def as_bytes(token: str) -> bytes:
    return bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()


def test_a_bos_that_was_put_in_front_is_no_part_of_the_echoed_text() -> None:
    ids = [1, *token_ids("Hi")]
    assert SPELLER.prompt_parts(ids, "Hi")[0] == b""
    assert SPELLER.prompt_parts(ids, "<|im_start|>Hi")[0] == b"<|im_start|>"


def test_prompt_logprobs_as_vllm_spells_them() -> None:
    [first, second] = SPELLER.prompt_logprobs([5, 6], scores([6]), 2)
    assert first is None
    assert second == {
        "10": {"logprob": -0.1, "rank": 1, "decoded_token": TOKEN_BYTES.bytes_of(10).decode()},
        "11": {"logprob": -0.2, "rank": 2, "decoded_token": TOKEN_BYTES.bytes_of(11).decode()},
        "6": {"logprob": -0.5, "rank": 4, "decoded_token": TOKEN_BYTES.bytes_of(6).decode()},
    }
