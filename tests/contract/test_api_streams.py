"""Streams of a real pod over a real Redis: OpenAI's clients, first bytes, keep-alive, choices, usage, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from shared.messages import Delta, End, GenerateRequest, TokenLogprob
from tests.support.api_pod import ApiPod, RawStream, chat_body, chunks_of, running_pod, texts_of
from tests.support.scripted_worker import ScriptedWorker, model_card, say, say_each, token_ids
from tests.support.wait import eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "Hello world, how are you?\n日本"
USAGE = {"stream_options": {"include_usage": True}}


def repeat_prompt(request: GenerateRequest) -> list[list[Delta]]:
    """Every choice says WORDS."""
    return say_each([WORDS] * request.num_choices)


async def test_the_openai_client_streams_and_reads_whole_answers(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, repeat_prompt),
        running_pod(redis_url) as pod,
        openai.AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="none", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages)
        parts = [
            part async for part in await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        ]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == WORDS
        assert whole.choices[0].message.content == WORDS
        async with client.chat.completions.stream(model="tiny", messages=messages, n=2) as stream:
            final = await stream.get_final_completion()
        assert [choice.message.role for choice in final.choices] == ["assistant", "assistant"]  # SSE-03
        assert [choice.message.content for choice in final.choices] == [WORDS, WORDS]
        text = await client.completions.create(model="tiny", prompt="x", echo=True)
        assert (text.choices[0].text, text.choices[0].finish_reason) == ("x" + WORDS, "stop")
        assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_sse_09_headers_role_and_comments_come_while_nothing_runs(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, repeat_prompt, gated=True) as worker,
        running_pod(redis_url, keepalive_s=0.1) as pod,
        RawStream(pod, CHAT, chat_body(stream=True)) as stream,
    ):
        assert stream.response.status_code == 200
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        events = aiter(stream)
        role = await anext(events)
        assert json.loads(role["data"])["choices"][0]["delta"]["role"] == "assistant"
        following = asyncio.ensure_future(anext(events))
        await eventually(lambda: stream.comments >= 3, what="three comments")
        assert not following.done()
        worker.allow_all()
        rest = [await following, *[event async for event in events]]
        assert rest[-1]["data"] == "[DONE]"
        assert texts_of(chunks_of(rest)) == {0: WORDS}


async def test_rl_27_a_token_is_seen_before_the_next_one_exists(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, repeat_prompt, gated=True) as worker,
        running_pod(redis_url) as pod,
        RawStream(pod, CHAT, chat_body(stream=True)) as stream,
    ):
        events = aiter(stream)
        await anext(events)
        for i in token_ids("Hello world, how"):
            worker.allow(1)
            async with asyncio.timeout(5):
                chunk = json.loads((await anext(events))["data"])
            assert i is not None
            assert chunk["choices"][0]["delta"]["content"]
        worker.allow_all()
        assert [event async for event in events][-1]["data"] == "[DONE]"


@pytest.mark.parametrize("n", [1, 3])
async def test_use_04_nch_02_both_modes_say_the_same(redis_url: str, n: int) -> None:
    async with ScriptedWorker(redis_url, repeat_prompt), running_pod(redis_url) as pod:
        for path, body in ((CHAT, chat_body(n=n)), (TEXT, {"model": "tiny", "prompt": ["A", "B"], "n": n})):
            whole = (await pod.post(path, body)).json()
            chunks = chunks_of(await pod.stream(path, {**body, "stream": True, **USAGE}))
            texts = [c["message"]["content"] if path == CHAT else c["text"] for c in whole["choices"]]
            assert texts_of(chunks) == dict(enumerate(texts))
            assert texts == [WORDS] * len(texts)
            assert chunks[-1]["usage"] == whole["usage"]
            assert whole["usage"]["completion_tokens"] == (len(token_ids(WORDS)) + 1) * len(texts)
            assert len({chunk["id"] for chunk in chunks}) == 1


async def test_nch_01_choices_of_prompt_lists_in_order(redis_url: str) -> None:
    def script(request: GenerateRequest) -> list[list[Delta]]:
        return say_each([f" {index}" for index in range(request.num_choices)], finish="length")

    async with ScriptedWorker(redis_url, script), running_pod(redis_url) as pod:
        body = {"model": "tiny", "prompt": ["A", "B", "C"], "n": 2, "echo": True}
        choices = (await pod.post(TEXT, body)).json()["choices"]
        assert [choice["text"] for choice in choices] == ["A 0", "A 1", "B 2", "B 3", "C 4", "C 5"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 6
        chunks = chunks_of(await pod.stream(TEXT, {**body, "stream": True}))
        assert texts_of(chunks) == {i: choice["text"] for i, choice in enumerate(choices)}


async def test_lgp_02_logprobs_reach_the_client_with_exact_bytes(redis_url: str) -> None:
    def script(request: GenerateRequest) -> list[list[Delta]]:
        ids = token_ids("日本")
        lps = tuple(TokenLogprob(i, -0.25, ((i, -0.25), (9, -3.0))[: request.sampling.logprobs]) for i in ids)
        return [[Delta(0, tuple(ids), "日本", lps, "length")]]

    async with ScriptedWorker(redis_url, script), running_pod(redis_url) as pod:
        whole = (await pod.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
        items = whole["logprobs"]["content"]
        assert bytes(byte for item in items for byte in item["bytes"]).decode() == whole["message"]["content"] == "日本"
        assert all(len(item["top_logprobs"]) == 2 for item in items)
        chunks = chunks_of(await pod.stream(CHAT, chat_body(stream=True, logprobs=True, top_logprobs=2)))
        assert [i for c in chunks for i in (c["choices"][0]["logprobs"] or {"content": []})["content"]] == items
        legacy = (await pod.post(TEXT, {"model": "tiny", "prompt": "x", "logprobs": 1})).json()["choices"][0][
            "logprobs"
        ]
        assert len(legacy["tokens"]) == len(items) == len(legacy["token_logprobs"]) == len(legacy["top_logprobs"])


async def test_sse_10_an_engine_error_is_an_event_in_a_stream_and_a_status_otherwise(redis_url: str) -> None:
    end = End("engine_failure", "The engine broke on this request.")

    def script(_: GenerateRequest) -> list[list[Delta]]:
        return [*say("Hel")[:-1], []]

    async with ScriptedWorker(redis_url, script, end=end), running_pod(redis_url) as pod:
        events = await pod.stream(CHAT, chat_body(stream=True))
        error = json.loads(events[-1]["data"])["error"]
        assert (error["code"], error["message"]) == (end.code, end.message)
        assert texts_of(chunks_of(events[:-1])) == {0: "Hel"}
        assert all(c["finish_reason"] is None for chunk in chunks_of(events[:-1]) for c in chunk["choices"])
        whole = await pod.chat()
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, end.code)
        async with openai.AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
            )
            with pytest.raises(openai.APIError, match="broke"):
                async for _chunk in stream:
                    pass


async def refused(pod: ApiPod, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    response = await pod.post(path, body)
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


async def test_err_05_unknown_models_and_bad_values_queue_nothing(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, repeat_prompt) as worker, running_pod(redis_url) as pod:
        for stream in (False, True):
            assert await refused(pod, CHAT, chat_body(stream=stream) | {"model": "nope"}) == (
                404,
                "model_not_found",
                "model",
            )
            assert await refused(pod, CHAT, chat_body(stream=stream, n=0)) == (400, "invalid_value", "n")
            too_long = chat_body(stream=stream, max_tokens=9000)
            assert await refused(pod, CHAT, too_long) == (400, "context_length_exceeded", "max_tokens")
            ids = {"model": "tiny", "prompt": [[5], [-1]], "stream": stream}
            assert await refused(pod, TEXT, ids) == (400, "invalid_value", "prompt[1]")
        answer = await pod.client.get("/v1/models/nope")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "'tiny'" in answer.json()["error"]["message"]
        assert worker.requests == []
        assert pod.services.admission.active == 0


async def test_ops_08_models_with_slashes(redis_url: str) -> None:
    card = model_card("org/tiny-1", max_model_len=512)  # its cache holds 256
    async with ScriptedWorker(redis_url, repeat_prompt, card=card), running_pod(redis_url) as pod:
        [listed] = (await pod.client.get("/v1/models")).json()["data"]
        assert listed["id"] == "org/tiny-1"
        assert (listed["object"], listed["created"], listed["max_model_len"]) == ("model", 1_700_000_000, 256)
        for path in ("/v1/models/org/tiny-1", "/v1/models/org%2Ftiny-1"):
            assert (await pod.client.get(path)).json() == listed
        assert (await pod.post(CHAT, chat_body() | {"model": "org/tiny-1"})).json()["model"] == "org/tiny-1"


async def test_ops_02_04_ready_follows_the_workers(redis_url: str) -> None:
    async with running_pod(redis_url, wait=False) as pod:
        assert (await pod.client.get("/ready")).status_code == 503
        assert (await pod.client.get("/v1/models")).json()["data"] == []
        async with ScriptedWorker(redis_url, repeat_prompt) as worker:
            await pod.ready()
            card = worker.worker_card
            worker.worker_card = type(card)(card.worker_id, "tiny", state="ready", running=2, last_step_age_ms=60_000)

            async def stuck() -> bool:
                ready = await pod.client.get("/ready")
                return ready.status_code == 503 and ready.json()["workers"][0]["last_step_age_ms"] == 60_000

            await eventually(stuck, what="the hung worker shows")
            worker.worker_card = card
            await pod.ready()


async def test_max_streams_refuses_with_a_time_to_retry(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, repeat_prompt, gated=True) as worker,
        running_pod(redis_url, max_streams=1) as pod,
    ):
        async with RawStream(pod, CHAT, chat_body(stream=True)) as stream:
            response = await pod.chat()
            assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
            assert response.headers["retry-after"] == "1"
            worker.allow_all()
            assert [event async for event in stream][-1]["data"] == "[DONE]"
        assert (await pod.chat()).status_code == 200
