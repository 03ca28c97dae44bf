"""Bodies: what is accepted, what is refused, and which parameter the refusal names."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from api_service.schemas.chat import ChatCompletionRequest
from api_service.schemas.common import GenerationBody, parse
from api_service.schemas.completion import CompletionRequest
from shared.errors import InvalidRequest
from tests.support.bad_messages import BAD_MESSAGES
from tests.support.bodies import USER, chat, completion, refused

BIG = 2**63
BOTH = pytest.mark.parametrize("make", [chat, completion])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "must have at least 1 item."),
        ({"messages": [None]}, "must be an object."),
        ({"messages": "Hi"}, "must be a list."),
        ({"response_format": "json"}, "must be an object."),
        ({"model": ""}, "must have at least 1 character."),
        ({"cache_salt": "a" * 257}, "must have at most 256 characters."),
    ],
)
def test_refusals_speak_of_json_not_of_python(fields: Any, words: str) -> None:
    assert refused(chat, **fields).message.endswith(words)


@BOTH
@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("n", [0, -1, 1.5, "2", True, 129, 1_000_000]),  # SSE-12, NCH-03
        ("max_tokens", [0, -1, -(2**31), 1.5, "5", True]),  # LIM-03
        ("temperature", [-0.1, 2.1, "1", True, [], {}]),
        ("top_p", [-0.1, 1.1, "1"]),
        ("top_k", [-2, 1.5, "3", True]),
        ("min_p", [-0.1, 1.1]),
        ("seed", [BIG, -BIG - 1, 1.5, "1"]),  # SMP-04
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, 1e-30, -1, 11]),
        ("guided_json", [False, True, 3, []]),
        ("stop", [[13], 13, [["a"]], {}, "", [""], ["x"] * 17]),  # STP-06
        ("stop_token_ids", [5, "5", [1.5], [True], ["1"]]),
        ("logit_bias", [[], "x", {"-1": 1}, {"abc": 1}, {"1.0": 1}, {"1": 1000}, {"1": "x"}, {"1": None}]),  # SMP-03
        ("stream", ["yes", 1]),
        ("min_tokens", [-1, 1.5]),
        ("ignore_eos", ["yes"]),
        ("model", [5, "", None]),
        ("deadline_ms", [0, -5, "soon"]),
    ],
)
def test_out_of_range_and_wrong_types_name_the_parameter(make: Any, field: str, bad: list[Any]) -> None:
    for value in bad:
        assert refused(make, **{field: value}).param == field, (field, value)


@BOTH
def test_null_is_absent(make: Any) -> None:
    plain = make()
    fields = [name for name in GenerationBody.model_fields if name != "model"]
    assert make(**dict.fromkeys(fields)) == plain


@BOTH
def test_smp_04_seeds_of_the_whole_int64_are_accepted(make: Any) -> None:
    for seed in (0, -1, -BIG, BIG - 1):
        assert make(seed=seed).seed == seed


@BOTH
def test_stop_forms(make: Any) -> None:
    assert make(stop="a").stop == ("a",)
    assert make(stop=["a", "b"]).stop == ("a", "b")
    assert make(stop=["x"] * 16).stop == ("x",) * 16


@BOTH
@pytest.mark.parametrize(
    ("options", "stream", "accepted"),
    [
        (None, False, True),
        (None, True, True),
        ({}, True, True),
        ({"include_usage": True}, True, True),
        ({"include_usage": None}, True, True),
        ({"include_usage": True, "include_obfuscation": False, "new": 1}, True, True),
        ({"include_usage": True}, False, False),
        ({}, None, False),
        ({"include_usage": "yes"}, True, False),
        ("x", True, False),
    ],
)
def test_use_08_stream_options(make: Any, options: Any, stream: bool | None, accepted: bool) -> None:
    fields = {"stream_options": options, "stream": stream}
    if accepted:
        assert make(**fields).include_usage == bool(options and options.get("include_usage"))
    else:
        assert (refused(make, **fields).param or "").startswith("stream_options")


@BOTH
@pytest.mark.parametrize(
    ("key", "refused_value", "harmless"),
    [
        ("store", True, False),
        ("best_of", 3, None),
        ("use_beam_search", True, False),
        ("prompt_logprobs", 21, 0),
        ("truncate_prompt_tokens", 0, -1),
        ("allowed_token_ids", [], [1]),
        ("bad_words", [" "], []),
        ("return_token_ids", 1, False),
        ("priority", 101, -100),
        ("cache_salt", "", "a"),
    ],
)
def test_smp_08_known_fields_are_refused_by_name_or_harmless(
    make: Any, key: str, refused_value: Any, harmless: Any
) -> None:
    assert refused(make, **{key: refused_value}).param == key
    make(**{key: harmless})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("functions", [{}]),
        ("audio", {}),
        ("modalities", ["audio"]),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
        ("chat_template", "x" * 65_537),
        ("echo", True),
    ],
)
def test_smp_08_of_chat(key: str, value: Any) -> None:
    assert refused(chat, **{key: value}).param == key


@BOTH
def test_msg_05_unknown_keys_are_ignored(make: Any) -> None:
    extra = {"foo": {"a": 1}, "metadata": {"k": "v"}, "safety_identifier": "s", "prompt_cache_key": "p"}
    assert make(**extra).model_dump() == make().model_dump()
    assert make(**extra, n=1, best_of=None, store=False).ignored == tuple(sorted(extra))
    assert make(**{"bad\r\nname": 1}).ignored == ()


def test_msg_05_unknown_keys_in_messages_are_ignored() -> None:
    noisy = {**USER, "id": 7, "opts": {"v": 1}, "cache_control": {"type": "ephemeral"}, "refusal": None}
    assert chat(messages=[noisy]).model_dump() == chat().model_dump()


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        *BAD_MESSAGES,
        ([USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([USER, {"role": "user", "content": []}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    ],
)
def test_msg_03_bad_messages_name_their_place(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param


def test_missing_messages_and_model() -> None:
    with pytest.raises(InvalidRequest, match="Missing required parameter: 'messages'"):
        parse(ChatCompletionRequest, {"model": "m"})
    with pytest.raises(InvalidRequest, match="Missing required parameter: 'model'"):
        parse(CompletionRequest, {"prompt": "x"})


def test_content_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"


def test_lim_10_thousands_of_bad_messages_make_one_short_message() -> None:
    bad = [{"role": "user", "content": {"a": 1}}] * 5000
    assert refused(chat, messages=bad).param == "messages[0].content"


def test_lgp_09_ranges_of_logprobs() -> None:
    for good in (0, 1, 5, 20):
        assert chat(logprobs=True, top_logprobs=good).top_logprobs == good
    for bad in (-1, 21, 1000):
        assert refused(chat, logprobs=True, top_logprobs=bad).param == "top_logprobs"
    assert refused(chat, top_logprobs=2).param == "top_logprobs"
    assert chat(logprobs=True, top_logprobs=None) == chat(logprobs=True)  # LGP-10
    for good in (0, 1, 5):
        assert completion(logprobs=good).logprobs == good
    for bad in (-1, 6, 21, 1000, True):
        assert refused(completion, logprobs=bad).param == "logprobs"


def test_msg_06_flags_that_contradict_each_other() -> None:
    messages = [USER, {"role": "assistant", "content": "Sure"}]
    chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat, **both).param == "continue_final_message"
    assert refused(chat, continue_final_message=True).param == "continue_final_message"


@pytest.mark.parametrize(
    "prompt",
    [[], {}, 5, None, [[-1], "a"], [1, "a"], ["a", [1]], [1.5], [True], [[1.5]], [[True]], [[["a"]]], [[[1]]], [None]],
)
def test_prm_03_shapes_that_are_no_prompt(prompt: Any) -> None:
    assert refused(completion, prompt=prompt).param == "prompt"


def test_forms_of_prompts() -> None:
    assert completion(prompt="a").prompt == ["a"]
    assert completion(prompt=["a", "b"]).prompt == ["a", "b"]
    assert completion(prompt=[1, 2]).prompt == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompt == [[1], [2, 3]]


def test_nch_03_prompts_times_n_are_bounded() -> None:
    assert refused(completion, prompt=["a"] * 600).param == "prompt"
    assert refused(completion, prompt=["a"] * 300, n=2).param == "n"


def test_completion_rules() -> None:
    assert completion(suffix="", best_of=1)
    assert completion(n=2, best_of=2)
    assert refused(completion, n=3, best_of=2).param == "best_of"
    assert completion(echo=True, logprobs=1, max_tokens=0).scored_alternatives == 1
    assert refused(completion, echo=True, max_tokens=0).param == "max_tokens"  # LIM-03
    assert refused(completion, logprobs=1, max_tokens=0).param == "max_tokens"
    assert refused(completion, prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    assert refused(completion, echo=True, suffix="x").param == "echo"


def test_no_input_ever_makes_another_error_than_a_400() -> None:
    rng = random.Random(7)
    values: list[Any] = [None, True, -1, 0, 1, 10**30, 1.5, "", "x", [], [1], {}, {"a": 1}, [[]], [None], "\ud800"]
    names = [*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields]
    for _ in range(3000):
        fields = {rng.choice(names): rng.choice(values) for _ in range(3)}
        for make in (chat, completion):
            with suppress(InvalidRequest):
                make(**fields)
