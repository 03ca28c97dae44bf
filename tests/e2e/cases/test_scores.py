"""Prompt log-probabilities: lm-eval's loglikelihood requests, against transformers on the same weights."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch

from tests.e2e.conftest import REAL_MODEL
from tests.support.stack import Stack

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(180)]

PROMPTS = ["Rivers flow to the", " sea. The naïve 水车 turns 🌊 slowly.", "A A A A A A A A"]


@pytest.fixture
def url(real_stack: Stack) -> str:
    return real_stack.pods[0].url


def complete(url: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/completions", json={"model": REAL_MODEL, "temperature": 0, **fields}, timeout=60)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(url: str, **fields: Any) -> dict[str, Any]:
    """The first choice of a stream, its arrays joined."""
    body = {"model": REAL_MODEL, "temperature": 0, "stream": True, **fields}
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    text, arrays = "", dict[str, list[Any]]((key, []) for key in keys)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [choice] = httpx.Response(200, content=line[6:]).json()["choices"]
                text += choice["text"]
                for key in arrays:
                    arrays[key] += (choice["logprobs"] or {}).get(key) or []
    return {"text": text, "logprobs": arrays}


def tokens_of(url: str, prompt: str) -> list[int]:
    ids: list[int] = httpx.post(f"{url}/tokenize", json={"model": REAL_MODEL, "prompt": prompt}).json()["tokens"]
    return ids


def expected(reference: Any, ids: list[int]) -> Any:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_lgp_08_loglikelihood_as_lm_eval_asks_for_it(url: str, reference: Any) -> None:
    """Batches of token ids, echo, logprobs 1, one token: `token_logprobs[context:-1]` are the continuation's scores."""
    batch = [tokens_of(url, prompt) for prompt in PROMPTS]
    body = complete(url, prompt=batch, echo=True, logprobs=1, max_tokens=1, seed=1234)
    for ids, choice in zip(batch, body["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + 1
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        wanted = expected(reference, ids)
        for i, (score, top) in enumerate(
            zip(logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True)
        ):
            assert score == pytest.approx(float(wanted[i][ids[i + 1]]), abs=1e-2)
            greedy = int(wanted[i].argmax()) == ids[i + 1]
            assert (score == max(top.values())) == greedy  # lm-eval's own test of is_greedy
    assert body["usage"]["prompt_tokens"] == sum(map(len, batch))


def test_lgp_08_text_and_tokens_agree(url: str) -> None:
    body = complete(url, prompt=PROMPTS[0], echo=True, logprobs=5, max_tokens=1)
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert choice["text"].startswith(PROMPTS[0])
    assert len(logprobs["tokens"]) == body["usage"]["prompt_tokens"] + 1
    assert all(5 <= len(top) <= 6 for top in logprobs["top_logprobs"][1:])
    likely, random = (
        complete(url, prompt=prompt, echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"]
        for prompt in (PROMPTS[2], " zebra forty lamp if seven grey of")
    )
    assert sum(likely[1:]) > sum(random[1:])


def test_lgp_08_an_answer_that_ends_at_once_still_has_one_entry_more(url: str) -> None:
    body = complete(url, prompt="Hi", echo=True, logprobs=1, max_tokens=1, logit_bias={"2": 100})
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "stop")
    assert len(choice["logprobs"]["token_logprobs"]) == body["usage"]["prompt_tokens"] + 1


def test_lim_03_a_prompt_is_scored_without_any_answer(url: str) -> None:
    for prompt in ("The sky is blue", "x"):
        body = complete(url, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        [choice] = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        assert body["usage"]["completion_tokens"] == 0
        assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize("prompt", ["Hello world", "日本語 🫠 ok"])
def test_lgp_06_streamed_arrays_equal_the_whole_answers(url: str, prompt: str) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 6}
    [whole] = complete(url, **fields)["choices"]
    stream = streamed(url, **fields)
    assert stream["text"] == whole["text"]
    assert {k: v for k, v in stream["logprobs"].items() if k != "token_logprobs" and k != "top_logprobs"} == {
        k: v for k, v in whole["logprobs"].items() if k in ("tokens", "text_offset")
    }
    scores, wanted = stream["logprobs"]["token_logprobs"], whole["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert scores[1:] == pytest.approx(wanted[1:], abs=1e-3)
    offsets, tokens = whole["logprobs"]["text_offset"], whole["logprobs"]["tokens"]
    assert offsets[0] == 0
    for offset, token in zip(offsets, tokens, strict=True):
        if not token.startswith("bytes:"):
            assert whole["text"][offset:].startswith(token)


def test_prompt_logprobs_beyond_one_chunk(url: str, reference: Any) -> None:
    """A prompt longer than a step's budget, sent twice: the second time its prefix is cached."""
    prompt = "The mill stands by the river and the wheel turns. " * 60
    ids = tokens_of(url, prompt)
    assert len(ids) > 600
    wanted = expected(reference, ids)
    for _ in range(2):
        [choice] = complete(url, prompt=prompt, prompt_logprobs=1, max_tokens=1)["choices"]
        entries = choice["prompt_logprobs"]
        assert entries[0] is None
        assert len(entries) == len(ids)
        scores = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], ids[1:], strict=True)]
        assert scores == pytest.approx([float(wanted[i][t]) for i, t in enumerate(ids[1:])], abs=1e-2)


@pytest.mark.parametrize("value", [-1, 6, 20, 21, 1000])
def test_lgp_09_more_alternatives_than_allowed_are_refused(url: str, value: int) -> None:
    text = httpx.post(f"{url}/v1/completions", json={"model": REAL_MODEL, "prompt": "x", "logprobs": value})
    assert (text.status_code, text.json()["error"]["param"]) == (400, "logprobs")
    chat = {"model": REAL_MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "logprobs": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json={**chat, "top_logprobs": value}, timeout=30)
    assert answer.status_code == (200 if 0 <= value <= 20 else 400)
    if answer.status_code == 200:
        assert len(answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == value


@pytest.mark.parametrize("value", [0, 1, 5])
def test_lgp_09_allowed_numbers_of_alternatives(url: str, value: int) -> None:
    [choice] = complete(url, prompt="x", logprobs=value, max_tokens=1)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 1
    assert choice["logprobs"]["top_logprobs"] is None if value == 0 else choice["logprobs"]["top_logprobs"]


def test_lgp_07_streamed_alternatives_are_each_tokens_own(url: str) -> None:
    body = {
        "model": REAL_MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": True,
        "top_logprobs": 3,
        "max_tokens": 16,
        "temperature": 0,
        "stop": ["§§"],
    }
    whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["logprobs"]["content"]
    told = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [choice] = httpx.Response(200, content=line[6:]).json()["choices"]
                told += (choice["logprobs"] or {}).get("content") or []
    assert [item["token"] for item in told] == [item["token"] for item in whole]
    for one, other in zip(told, whole, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert [top["token"] for top in one["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]
