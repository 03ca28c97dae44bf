"""Cases of kinds sse and usage: envelopes, roles, finish reasons, line breaks, usage objects."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.api_cases import CHAT, MODEL, TEXT, body_of, content_of, force, post, refused, stream, whole

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(120)]
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


def test_sse_02_one_id_and_created_for_the_whole_stream(url: str) -> None:
    for path, prefix, name in ((TEXT, "cmpl-", "text_completion"), (CHAT, "chatcmpl-", "chat.completion.chunk")):
        answer = stream(url, path, max_tokens=6)
        [(id_, created)] = {(chunk["id"], chunk["created"]) for chunk in answer.chunks}
        assert id_.startswith(prefix)
        assert created > 1_600_000_000
        assert {chunk["object"] for chunk in answer.chunks} == {name}
        assert answer.done


def test_sse_03_the_role_comes_once_for_each_choice(url: str) -> None:
    answer = stream(url, CHAT, max_tokens=8, n=2, temperature=1.0)
    for index in (0, 1):
        first, *later = answer.choices(index)
        assert first["delta"]["role"] == "assistant"
        assert all(choice["delta"].get("role") is None for choice in later)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, logit_bias={"2": 100}
    ) as s:
        assert s.get_final_completion().choices[0].message.role == "assistant"


def test_sse_04_every_delta_is_of_the_documented_shape(url: str) -> None:
    for choice in stream(url, CHAT, max_tokens=8).choices():
        assert choice["delta"].get("role") in (None, "assistant")
        assert isinstance(choice["delta"].get("content"), str | None)
        assert choice["finish_reason"] in (None, "stop", "length", "tool_calls", "content_filter", "function_call")


@BOTH
def test_sse_06_one_finish_for_each_choice_and_nothing_after_it(url: str, path: str) -> None:
    answer = stream(url, path, max_tokens=5, n=3, temperature=1.0, stream_options={"include_usage": True})
    for index in range(3):
        choices = answer.choices(index)
        assert [c["finish_reason"] is not None for c in choices] == [False] * (len(choices) - 1) + [True]
    assert answer.chunks[-1]["choices"] == []
    assert answer.done


def test_sse_08_unicode_line_breaks_are_escaped(url: str) -> None:
    text = "A\u2028B\u2029C\u0085D"
    answer = stream(url, TEXT, text=text, echo=True, max_tokens=1)
    assert answer.text().startswith(text)
    assert not set(text[1::2]) & set(answer.raw)


@BOTH
def test_sse_12_a_bad_streaming_request_is_refused_at_once(url: str, path: str) -> None:
    refused(post(url, path, body_of(path, stream=True, n=0)), "n")


def test_sse_13_no_chunk_without_news(url: str) -> None:
    answer = stream(url, CHAT, max_tokens=12, stop=["QQQQQQQQ"])
    empty = [c for c in answer.choices() if not content_of(c) and c["finish_reason"] is None]
    assert len(empty) <= 1


@BOTH
def test_use_01_usage_is_the_last_event_alone(url: str, path: str) -> None:
    answer = stream(url, path, stream_options={"include_usage": True})
    assert [chunk.get("usage") is not None for chunk in answer.chunks] == [False] * (len(answer.chunks) - 1) + [True]
    assert answer.chunks[-1]["choices"] == []
    assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + answer.usage["completion_tokens"]


@BOTH
@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}, {"include_usage": None}])
def test_use_02_no_usage_unless_it_is_asked_for(url: str, path: str, options: Any) -> None:
    answer = stream(url, path, max_tokens=2, stream_options=options)
    assert all(chunk.get("usage") is None for chunk in answer.chunks)
    assert answer.chunks[-1]["choices"]


@pytest.mark.parametrize("n", [1, 3])
def test_use_04_06_both_modes_count_tokens_alike(url: str, n: int) -> None:
    fields = {"n": n, "max_tokens": 20, **force(260)}
    whole(url, CHAT, **fields)  # so that the prefix is as cached for one as for the other
    told = whole(url, CHAT, **fields)["usage"]
    streamed = stream(url, CHAT, **fields, stream_options={"include_usage": True}).usage
    assert streamed["completion_tokens"] == told["completion_tokens"] == 20 * n
    assert streamed["prompt_tokens"] == told["prompt_tokens"]
    for usage in (told, streamed):
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def test_use_05_prompt_tokens_grow_with_the_prompt(url: str) -> None:
    short, long = (whole(url, CHAT, text=text, max_tokens=1)["usage"]["prompt_tokens"] for text in ("A", "A A A"))
    assert long == short + 2
    streamed = stream(url, CHAT, text="A", max_tokens=1, stream_options={"include_usage": True})
    assert streamed.usage["prompt_tokens"] == short


@BOTH
def test_use_08_options_of_a_stream_need_one(url: str, path: str) -> None:
    refused(post(url, path, body_of(path, stream_options={"include_usage": True})), "stream_options")
    assert post(url, path, body_of(path, max_tokens=1, stream_options=None)).status_code == 200
    wrong = post(url, path, body_of(path, stream=True, stream_options={"include_usage": "yes"}))
    refused(wrong, "stream_options.include_usage")
