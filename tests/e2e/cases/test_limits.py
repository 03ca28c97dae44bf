"""Cases of kinds limits, choices, sampling, prompt and logprobs: what is allowed, what is refused by name."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from tests.support.api_cases import CHAT, MODEL, TEXT, body_of, force, post, refused, stream, whole

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(120)]
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


@BOTH
@pytest.mark.parametrize("value", [0, -1, -(2**31), 1.5, "5", True])
def test_lim_03_numbers_of_tokens_that_make_no_sense(url: str, path: str, value: Any) -> None:
    refused(post(url, path, body_of(path, max_tokens=value)), "max_tokens")


def test_lim_04_defaults_of_max_tokens(url: str) -> None:
    text = whole(url, TEXT, max_tokens=None, **force(260))
    assert (text["usage"]["completion_tokens"], text["choices"][0]["finish_reason"]) == (16, "length")
    chat = whole(url, CHAT, max_tokens=None, stop=[" the" * 30], **force(260))
    assert chat["usage"]["completion_tokens"] == 30


@BOTH
def test_lim_05_the_message_has_the_true_numbers(url: str, path: str) -> None:
    response = post(url, path, body_of(path, max_tokens=9000))
    refused(response, "max_tokens")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert "9000" in error["message"]
    too_long = post(url, path, body_of(path, text="a " * 9000))
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


@BOTH
@pytest.mark.parametrize(("token", "reason"), [(260, "length"), (2, "stop")])
def test_lim_06_the_reason_says_what_ended_it(url: str, path: str, token: int, reason: str) -> None:
    assert whole(url, path, max_tokens=1, **force(token))["choices"][0]["finish_reason"] == reason
    assert stream(url, path, max_tokens=1, **force(token)).finish() == reason


async def test_lim_08_a_huge_body_does_not_hold_up_the_pod(url: str) -> None:
    """20 MB, announced and chunked, while /health is asked 20 times a second."""
    body = json.dumps(body_of(CHAT, text="a" * 20_000_000)).encode()

    async def chunked() -> Any:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    slowest, done = 0.0, asyncio.Event()

    async def watch(client: httpx.AsyncClient) -> None:
        nonlocal slowest
        while not done.is_set():
            began = time.monotonic()
            assert (await client.get(f"{url}/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.05)

    async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as group:
        group.create_task(watch(client))
        headers = {"content-type": "application/json"}
        for content in (body, chunked()):
            response = await client.post(url + CHAT, content=content, headers=headers)
            refused(response, None, 413)
        long = await client.post(url + CHAT, json=body_of(CHAT, text="a " * 2_000_000))
        refused(long, "messages")
        done.set()
    assert slowest < 2.0  # on a machine that does other work as well


@pytest.mark.parametrize("depth", [100, 3000, 100_000])
@pytest.mark.parametrize("field", ["tools", "response_format", "logit_bias", "unknown"])
def test_lim_09_deep_nesting_is_a_400(url: str, depth: int, field: str) -> None:
    raw = json.dumps(body_of(CHAT)).encode()[:-1] + f', "{field}": {"[" * depth}{"]" * depth}}}'.encode()
    assert post(url, CHAT, raw=raw).status_code == 400


def test_lim_10_many_faults_make_a_short_answer(url: str) -> None:
    messages = [{"role": "user", "content": {"a": 1}}] * 5000
    refused(post(url, CHAT, body_of(CHAT, messages=messages)), "messages[0].content")


@pytest.mark.parametrize("streamed", [False, True])
def test_nch_01_choices_of_a_list_of_prompts(url: str, streamed: bool) -> None:
    fields = {"prompt": ["A", "B", "C"], "n": 2, "max_tokens": 2, "echo": True}
    if streamed:
        answer = stream(url, TEXT, **fields)
        texts = [answer.text(index) for index in range(6)]
    else:
        body = whole(url, TEXT, **fields)
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 12)
        texts = [choice["text"] for choice in body["choices"]]
    assert [text[0] for text in texts] == list("AABBCC")


def test_nch_01_a_large_batch(url: str) -> None:
    answer = whole(url, TEXT, prompt=["A"] * 33, max_tokens=1, echo=True)
    assert [choice["text"][0] for choice in answer["choices"]] == ["A"] * 33


@pytest.mark.parametrize("more", [{}, {"stop": ["§§"]}, force(10813)])
def test_nch_02_choices_do_not_mix(url: str, more: dict[str, Any]) -> None:
    alone = whole(url, CHAT, max_tokens=8, **more)["choices"][0]["message"]["content"]
    answer = stream(url, CHAT, max_tokens=8, n=3, **more)
    assert [answer.text(index) for index in range(3)] == [alone] * 3


@BOTH
@pytest.mark.parametrize("n", [1_000_000, 0, -1, 1.5, "2", True])
def test_nch_03_sse_12_n_has_bounds(url: str, path: str, n: Any) -> None:
    started = time.monotonic()
    refused(post(url, path, body_of(path, n=n)), "n")
    assert time.monotonic() - started < 5


def test_nch_03_best_of_below_n(url: str) -> None:
    refused(post(url, TEXT, body_of(TEXT, n=3, best_of=2)), "best_of")


def test_lgp_02_bytes_are_the_tokens_own(url: str) -> None:
    [item] = whole(url, CHAT, logprobs=True, max_tokens=1, **force(10813))["choices"][0]["logprobs"]["content"]
    assert item["bytes"] == [240, 159]
    answer = whole(url, CHAT, logprobs=True, max_tokens=8)["choices"][0]
    parts = b"".join(bytes(item["bytes"]) for item in answer["logprobs"]["content"])
    assert parts.decode() == answer["message"]["content"]
    assert whole(url, CHAT, logprobs=True, max_tokens=2)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("more", [{"top_p": 0.01}, {"top_k": 1}, {"logit_bias": {"49": -100}}, force(905)])
def test_lgp_05_every_logprob_is_a_number(url: str, more: dict[str, Any]) -> None:
    """The helpers refuse a body with NaN or Infinity."""
    fields = {"temperature": 1, "max_tokens": 2, **more}
    whole(url, CHAT, logprobs=True, top_logprobs=20, **fields)
    stream(url, CHAT, logprobs=True, top_logprobs=20, **fields)
    whole(url, TEXT, logprobs=5, **fields)


@BOTH
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"'])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "min_tokens", "max_tokens"]
)
def test_smp_01_numbers_that_are_none(url: str, path: str, number: str, field: str) -> None:
    base = {key: value for key, value in body_of(path).items() if key != field}
    response = post(url, path, raw=json.dumps(base).encode()[:-1] + f', "{field}": {number}}}'.encode())
    refused(response, field)
    assert "NaN" not in response.text


@pytest.mark.parametrize(
    "bias", [{"60000": 1}, {"49152": 1}, {"-1": 1}, {"abc": 1}, {"1.0": 1}, {"1": 1000}, {"1": "x"}, {"1": None}, []]
)
def test_smp_03_biases_that_are_none(url: str, bias: Any) -> None:
    refused(post(url, CHAT, body_of(CHAT, logit_bias=bias)), "logit_bias")


def test_smp_03_a_bias_bans_and_forces(url: str) -> None:
    assert whole(url, TEXT, max_tokens=1, logit_bias={})["choices"]
    first = whole(url, TEXT, text="The", max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    other = whole(url, TEXT, text="The", max_tokens=1, return_token_ids=True, logit_bias={str(first): -100})
    assert other["choices"][0]["token_ids"][0] != first


async def test_smp_04_a_seed_holds_alone_and_in_company(url: str) -> None:
    async with httpx.AsyncClient(timeout=60) as client:

        async def text(**fields: Any) -> str:
            body = body_of(CHAT, temperature=1.0, max_tokens=10, **fields)
            answer: str = (await client.post(url + CHAT, json=body)).json()["choices"][0]["message"]["content"]
            return answer

        alone = [await text(seed=42) for _ in range(2)]
        crowd = await asyncio.gather(*(text(seed=42) for _ in range(2)), *(text() for _ in range(5)))
        assert {*alone, *crowd[:2]} == {alone[0]}
        assert len(set(await asyncio.gather(*(text(seed=seed) for seed in (0, -1, 2**63 - 1, 7))))) > 1
    for seed in (2**63, -(2**63) - 1, 1.5):
        refused(post(url, CHAT, body_of(CHAT, seed=seed)), "seed")


def test_smp_05_without_a_seed_answers_differ(url: str) -> None:
    fields = {"text": "Tell me a story.", "temperature": 1.5, "max_tokens": 8}
    assert len({whole(url, CHAT, **fields)["choices"][0]["message"]["content"] for _ in range(3)}) > 1
    several = [[c["message"]["content"] for c in whole(url, CHAT, n=4, seed=3, **fields)["choices"]] for _ in range(2)]
    assert several[0] == several[1]
    assert len(set(several[0])) > 1


@pytest.mark.parametrize("more", [{"top_p": 0}, {"top_k": 1}, {"min_p": 1}])
def test_smp_06_the_ends_of_ranges_are_greedy(url: str, more: dict[str, Any]) -> None:
    assert whole(url, CHAT, temperature=1, **more)["choices"][0]["message"] == whole(url, CHAT)["choices"][0]["message"]


def test_smp_08_standard_fields_have_their_effect(url: str) -> None:
    fields = {"max_tokens": None, "max_completion_tokens": 5, "n": 3, "logprobs": True, "stop": ["§"]}
    answer = whole(url, CHAT, **fields)
    assert len(answer["choices"]) == 3
    assert answer["usage"]["completion_tokens"] <= 15
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([""], "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ("\u0004", "prompt"),
        ([[49], []], "prompt[1]"),
        (["A", ""], "prompt[1]"),
        ([[]] * 16, "prompt[0]"),
        ([[-1]], "prompt"),
        ([[49152]], "prompt"),
        ([2**31], "prompt"),
        ([2**63], "prompt"),
        ([1.5], "prompt"),
        ([True], "prompt"),
        (["5", 5], "prompt"),
        ([[[1]]], "prompt"),
        ([1, "a"], "prompt"),
        (["a", [1]], "prompt"),
    ],
)
def test_prm_01_02_03_prompts_that_are_none(url: str, prompt: Any, param: str) -> None:
    refused(post(url, TEXT, body_of(TEXT, prompt=prompt)), param)


def test_prm_03_special_ids_are_allowed(url: str) -> None:
    assert whole(url, TEXT, prompt=[0, 1, 2, 16], max_tokens=1)["usage"]["prompt_tokens"] == 4


def test_prm_05_a_chat_is_tokenized_like_its_own_text(url: str) -> None:
    ids = post(url, "/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "A"}]}).json()["tokens"]
    text = post(url, "/detokenize", {"model": MODEL, "tokens": ids}).json()["prompt"]
    assert text.count("<|im_start|>assistant") == 1
    chat = whole(url, CHAT, text="A", max_tokens=1)["usage"]["prompt_tokens"]
    assert chat == len(ids) == whole(url, TEXT, text=text, max_tokens=1)["usage"]["prompt_tokens"]
