"""Cases of kinds detokenization and stop, with forced tokens of SmolLM2."""

from __future__ import annotations

import httpx
import pytest

from tests.support.api_cases import CHAT, TEXT, body_of, content_of, force, post, refused, stream, whole

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(120)]
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])
WORLD, HALF_EMOJI, LEAD_BYTE, NEWLINE, SPACE, EOS = 905, 10813, 187, 198, 216, 2


def text_of(answer: dict[str, object], index: int = 0) -> str:
    choice = answer["choices"][index]  # type: ignore[index]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@BOTH
@pytest.mark.parametrize("count", [1, 2, 3])
def test_det_02_a_cut_character_is_alike_in_both_modes(url: str, path: str, count: int) -> None:
    fields = {"max_tokens": count, **force(HALF_EMOJI)}
    answer = whole(url, path, **fields)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", count)
    assert stream(url, path, **fields).text() == text_of(answer)


def test_det_03_bytes_that_never_form_a_character_are_shown_as_they_come(url: str) -> None:
    fields = {"text": "x", "max_tokens": 24, **force(LEAD_BYTE)}
    answer = stream(url, TEXT, **fields, stream_options={"include_usage": True})
    assert answer.usage["completion_tokens"] == 24
    assert sum(bool(content_of(choice)) for choice in answer.choices() if choice["finish_reason"] is None) > 1
    assert answer.text() == text_of(whole(url, TEXT, **fields))
    assert set(answer.text()) == {"\ufffd"}
    assert text_of(whole(url, TEXT, text="\ufffd", echo=True, max_tokens=1)).startswith("\ufffd")


@BOTH
@pytest.mark.parametrize(("token", "text"), [(NEWLINE, "\n"), (SPACE, " ")])
def test_det_05_white_space_is_not_trimmed(url: str, path: str, token: int, text: str) -> None:
    fields = {"max_tokens": 4, **force(token)}
    assert text_of(whole(url, path, **fields)) == stream(url, path, **fields).text() == text * 4


@BOTH
def test_det_06_the_end_token_is_no_text(url: str, path: str) -> None:
    answer, streamed = whole(url, path, **force(EOS)), stream(url, path, **force(EOS))
    assert text_of(answer) == streamed.text() == ""
    assert answer["choices"][0]["finish_reason"] == streamed.finish() == "stop"
    assert answer["usage"]["completion_tokens"] in (0, 1)
    ignoring = whole(url, path, ignore_eos=True, max_tokens=2, **force(EOS))
    assert (text_of(ignoring), ignoring["choices"][0]["finish_reason"]) == ("", "length")
    shown = whole(url, path, ignore_eos=True, max_tokens=1, skip_special_tokens=False, **force(EOS))
    assert text_of(shown) == "<|im_end|>"


@BOTH
@pytest.mark.parametrize("stop", ["rld wo", ["rld wo", "§"]])
@pytest.mark.parametrize("include", [False, True])
def test_stp_01_08_a_stop_over_several_tokens(url: str, path: str, stop: str | list[str], include: bool) -> None:
    fields = {"max_tokens": 8, "stop": stop, "include_stop_str_in_output": include, **force(WORLD)}
    answer, streamed = whole(url, path, **fields), stream(url, path, **fields)
    assert text_of(answer) == streamed.text() == (" world wo" if include else " wo")
    assert answer["choices"][0]["finish_reason"] == streamed.finish() == "stop"


@BOTH
def test_stp_02_a_tail_that_is_no_stop_after_all_is_sent(url: str, path: str) -> None:
    fields = {"max_tokens": 3, "stop": ["world!!!"], **force(WORLD)}
    answer, streamed = whole(url, path, **fields), stream(url, path, **fields)
    assert text_of(answer) == streamed.text() == " world world world"
    assert streamed.finish() == "length"


@pytest.mark.parametrize("stop", [[13], 13, [["a"]], {}])
def test_stp_06_stops_are_strings(url: str, stop: object) -> None:
    refused(post(url, CHAT, body_of(CHAT, stop=stop)), "stop")


@pytest.mark.parametrize("token", [60001, -1, 49152])
def test_stp_07_a_stop_token_outside_the_vocabulary(url: str, token: int) -> None:
    refused(post(url, CHAT, body_of(CHAT, min_tokens=1, stop_token_ids=[token])), "stop_token_ids")


def test_stp_09_a_long_stop_that_never_comes_delays_nothing(url: str) -> None:
    plain, held = (stream(url, CHAT, max_tokens=16, **more) for more in ({}, {"stop": ["Q" * 200]}))
    assert plain.text() == held.text()
    chunks = [sum(bool(content_of(choice)) for choice in answer.choices()) for answer in (plain, held)]
    assert chunks[1] >= 0.5 * chunks[0]  # tokens may share an event, by chance, in either


def test_stp_10_the_engine_itself_stops(url: str) -> None:
    answer = whole(url, TEXT, max_tokens=2000, stop=["world world"], **force(WORLD))
    assert answer["usage"]["completion_tokens"] <= 3
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}


def test_min_tokens_exempts_the_first_tokens_from_stops(url: str) -> None:
    answer = whole(url, TEXT, max_tokens=8, min_tokens=3, stop=["world"], **force(WORLD))
    assert text_of(answer) == " world world world "
    assert answer["usage"]["completion_tokens"] == 4


def test_bad_words_and_allowed_tokens_are_obeyed(url: str) -> None:
    fields = {"text": "x", "max_tokens": 3, "logit_bias": {"905": 60, "260": 40}}
    assert text_of(whole(url, TEXT, **fields)) == " world" * 3
    assert text_of(whole(url, TEXT, **fields, bad_words=["world"])) == " the" * 3
    assert "world" not in text_of(whole(url, TEXT, **fields, bad_words=[" world"]))
    allowed = whole(
        url, TEXT, text="x", max_tokens=4, temperature=1, allowed_token_ids=[260, 905], return_token_ids=True
    )
    [choice] = allowed["choices"]
    assert set(choice["token_ids"]) <= {260, 905}
    assert choice["prompt_token_ids"]
