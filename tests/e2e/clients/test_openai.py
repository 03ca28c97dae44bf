"""OpenAI's own client, sync and async: its helpers for parsing and streams, raw answers, every resource we serve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.e2e.clients.conftest import CAPITAL, KEY, TOOL
from tests.e2e.conftest import REAL_MODEL
from tests.support.stack import Pod
from tests.support.wait import eventually

pytestmark = pytest.mark.real_model

ASK: dict[str, Any] = {
    "model": REAL_MODEL,
    "messages": [{"role": "user", "content": CAPITAL}],
    "temperature": 0,
    "max_tokens": 24,
}


class Pick(BaseModel):
    """What the parse helpers turn into a strict schema."""

    color: Literal["teal", "é", "日本"]
    shade: Literal["dark"] | None


@pytest.fixture
def client(pod: Pod) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=pod.base_url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(pod: Pod) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=pod.base_url, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK)
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert isinstance(whole, ChatCompletion)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    assert whole.model_extra == {}
    assert all(isinstance(c, ChatCompletionChunk) and c.model_extra == {} for c in chunks)


async def test_async_streams_run_side_by_side(async_client: openai.AsyncOpenAI) -> None:
    async def streamed(prompt: str) -> str:
        body = ASK | {"messages": [{"role": "user", "content": prompt}]}
        return "".join([c.choices[0].delta.content or "" async for c in await create(**body, stream=True)])

    create = async_client.chat.completions.create
    prompts = [f"What is the capital of {country}?" for country in ("France", "Italy", "Spain", "Japan")]
    side_by_side = await asyncio.gather(*map(streamed, prompts))
    assert side_by_side == [await streamed(prompt) for prompt in prompts]
    assert "Paris" in side_by_side[0]


async def test_an_async_stream_that_is_left_frees_the_pod(async_client: openai.AsyncOpenAI, pod: Pod) -> None:
    stream = await async_client.chat.completions.create(**ASK | {"max_tokens": 2000}, stream=True)
    async with stream:
        async for chunk in stream:
            assert chunk.id
            break
    root = async_client.with_options(base_url=pod.url)

    async def carries_nothing() -> bool:
        return await root.get("/load", cast_to=object) == {"server_load": 0}

    await eventually(carries_nothing)


def test_beta_parse(client: openai.OpenAI) -> None:
    answer = client.beta.chat.completions.parse(**ASK | {"max_tokens": 64}, response_format=Pick)
    assert answer.choices[0].message.parsed == Pick.model_validate_json(answer.choices[0].message.content or "")
    assert answer.choices[0].message.refusal is None


async def test_async_parse_of_an_answer_and_of_a_call(async_client: openai.AsyncOpenAI) -> None:
    parse = async_client.chat.completions.parse
    tool = openai.pydantic_function_tool(Pick, name="pick")
    answer, called = await asyncio.gather(
        parse(**ASK | {"max_tokens": 64}, response_format=Pick),
        parse(**ASK | {"max_tokens": 64}, tools=[tool], tool_choice="required", parallel_tool_calls=False),
    )
    assert isinstance(answer.choices[0].message.parsed, Pick)
    [call] = called.choices[0].message.tool_calls or []
    assert call.function.name == "pick"
    assert isinstance(call.function.parsed_arguments, Pick)


def test_parse_says_when_the_answer_was_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        client.chat.completions.parse(**ASK | {"max_tokens": 2}, response_format=Pick)
    assert caught.value.completion.usage is not None
    assert caught.value.completion.usage.completion_tokens == 2


def test_the_stream_helper_of_a_parsed_answer(client: openai.OpenAI) -> None:
    body = ASK | {"max_tokens": 64, "logprobs": True, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**body, response_format=Pick) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    text = "".join(event.delta for event in events if event.type == "content.delta")
    [done] = [event for event in events if event.type == "content.done"]
    assert isinstance(done.parsed, Pick)
    assert final.choices[0].message.parsed == done.parsed == Pick.model_validate_json(text)
    tokens = [entry for event in events if event.type == "logprobs.content.delta" for entry in event.content]
    assert b"".join(bytes(entry.bytes or ()) for entry in tokens).decode() == text
    assert final.usage is not None
    assert final.usage.completion_tokens >= len(tokens) > 0


async def test_the_async_stream_helper_of_a_call(async_client: openai.AsyncOpenAI) -> None:
    body = ASK | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 64, "parallel_tool_calls": False}
    async with async_client.chat.completions.stream(**body) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert "".join(event.arguments_delta for event in deltas) == done.arguments
    assert json.loads(done.arguments) == {"color": "teal"}
    [call] = final.choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("pick_color", done.arguments)
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_call_its_result_and_the_answer(client: openai.OpenAI) -> None:
    tools = {"tools": [TOOL], "max_tokens": 64}
    first = client.chat.completions.create(**ASK | tools, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    [call] = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "The colour is teal."}
    history = [*ASK["messages"], message.model_dump(exclude_none=True), result]
    final = client.chat.completions.create(**ASK | {"messages": history, "max_tokens": 8})
    assert final.choices[0].message.content
    assert final.choices[0].message.tool_calls is None


def test_raw_and_streaming_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**ASK, extra_headers={"x-request-id": "mine-1"})
    parsed = raw.parse()
    assert (raw.status_code, raw.headers["x-request-id"], raw.retries_taken) == (200, "mine-1", 0)
    assert parsed._request_id == "mine-1"
    assert json.loads(raw.text)["id"] == parsed.id
    create = client.chat.completions.with_streaming_response.create
    with create(**ASK, stream=True) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data:"))["object"] == "chat.completion.chunk"


def test_text_completions(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": REAL_MODEL, "prompt": "The capital of France is", "temperature": 0}
    whole = client.completions.create(**body, max_tokens=4, logprobs=2).choices[0]
    assert whole.text.startswith(" Paris")
    assert whole.logprobs is not None
    assert "".join(whole.logprobs.tokens or ()) == whole.text
    assert all(len(top) == 2 for top in whole.logprobs.top_logprobs or ())
    chunks = list(client.completions.create(**body, max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


def test_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    inputs = ["A cat.", "A kitten.", "Quarterly tax law"]
    packed = client.embeddings.create(model=REAL_MODEL, input=inputs)  # the client asks for base64 by itself
    plain = client.embeddings.create(model=REAL_MODEL, input=inputs, encoding_format="float")
    for ours, same in zip(packed.data, plain.data, strict=True):
        assert ours.index == same.index
        assert ours.embedding == pytest.approx(same.embedding, abs=1e-6)
        assert sum(x * x for x in ours.embedding) == pytest.approx(1, abs=1e-3)
    cat, kitten, law = (entry.embedding for entry in packed.data)
    assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > sum(a * b for a, b in zip(cat, law, strict=True))
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0


async def test_models(client: openai.OpenAI, async_client: openai.AsyncOpenAI) -> None:
    [model] = client.models.list()
    assert (model.id, model.object, model.owned_by) == (REAL_MODEL, "model", "headrace")
    assert client.models.retrieve(REAL_MODEL) == model
    assert [other async for other in async_client.models.list()] == [model]


def test_vllms_parameters_pass_in_extra_body(client: openai.OpenAI) -> None:
    extra = {"guided_choice": ["north", "south"], "top_k": 1, "repetition_penalty": 1.1, "return_token_ids": True}
    answer = client.chat.completions.create(**ASK, extra_body=extra).choices[0]
    assert answer.message.content in ("north", "south")
    assert answer.model_extra is not None
    assert answer.model_extra["token_ids"]
