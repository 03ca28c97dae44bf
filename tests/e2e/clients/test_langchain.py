"""LangChain's OpenAI classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.e2e.clients.conftest import CAPITAL, KEY
from tests.e2e.conftest import REAL_MODEL
from tests.support.stack import Pod

pytestmark = pytest.mark.real_model

ASK = [SystemMessage("Be brief."), HumanMessage(CAPITAL)]


class PickColor(BaseModel):
    """Picks a colour."""

    color: Literal["teal"]


@pytest.fixture
async def settings(pod: Pod) -> AsyncIterator[dict[str, Any]]:
    """Clients of its own for each test: LangChain's are never closed."""
    with httpx.Client() as sync:
        async with httpx.AsyncClient() as client:
            clients = {"http_client": sync, "http_async_client": client}
            yield {"base_url": pod.base_url, "api_key": KEY, "model": REAL_MODEL, "max_retries": 0, **clients}


@pytest.fixture
def chat(settings: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**settings, temperature=0, max_tokens=64, stream_usage=True)


async def test_whole_streamed_and_batched(chat: ChatOpenAI) -> None:
    whole = chat.invoke(ASK)
    assert "Paris" in whole.text
    assert whole.response_metadata["finish_reason"] == "stop"
    chunks = list(chat.stream(ASK))
    streamed = AIMessageChunk(content="")
    for chunk in chunks:
        streamed += chunk
    assert len(chunks) > 3
    assert streamed.text == whole.text
    assert whole.usage_metadata is not None
    assert streamed.usage_metadata is not None
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"] > 0
    assert [m.text for m in chat.batch([ASK, ASK])] == [whole.text] * 2


async def test_async(chat: ChatOpenAI) -> None:
    async def streamed() -> str:
        return "".join([chunk.text async for chunk in chat.astream(ASK)])

    whole, text = await asyncio.gather(chat.ainvoke(ASK), streamed())
    assert whole.text == text
    assert "Paris" in text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output(chat: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
    structured = chat.with_structured_output(PickColor, method=method, strict=True)
    assert structured.invoke("color?") == PickColor(color="teal")
    assert await structured.ainvoke("color?") == PickColor(color="teal")


async def test_tools_there_and_back(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([PickColor], tool_choice="any", strict=True, parallel_tool_calls=False)
    whole = bound.invoke("color?")
    assert isinstance(whole, AIMessage)
    [call] = whole.tool_calls
    assert (call["name"], call["args"]) == ("PickColor", {"color": "teal"})
    streamed = AIMessageChunk(content="")
    for chunk in bound.stream("color?"):
        streamed += chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("PickColor", {"color": "teal"})]
    answer = ToolMessage("Teal it is.", tool_call_id=call["id"])
    assert chat.bind(max_tokens=8).invoke([HumanMessage("color?"), whole, answer]).text


async def test_logprobs_and_vllms_parameters(chat: ChatOpenAI) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "extra_body": {"guided_choice": ["north", "süd"]}}
    message = chat.bind(**options).invoke("Where?")
    assert message.text in ("north", "süd")
    tokens = message.response_metadata["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == message.text
    assert {len(token["top_logprobs"]) for token in tokens} == {2}


async def test_text_completions(settings: dict[str, Any]) -> None:
    llm = OpenAI(**settings, temperature=0, max_tokens=4)
    whole = llm.invoke("The capital of France is")
    assert whole.startswith(" Paris")
    assert "".join(llm.stream("The capital of France is")) == whole


async def test_embeddings(settings: dict[str, Any]) -> None:
    """`check_embedding_ctx_length` off: on, LangChain sends token ids of OpenAI's own vocabulary."""
    embeddings = OpenAIEmbeddings(**settings, check_embedding_ctx_length=False)
    documents = embeddings.embed_documents(["A cat.", "Tax law"])
    assert [len(vector) for vector in documents] == [576, 576]
    assert await embeddings.aembed_query("A cat.") == pytest.approx(documents[0], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        ({"model": "no-such"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "invalid_value"),
        ({"api_key": "sk-wrong"}, openai.AuthenticationError, "invalid_api_key"),
    ],
)
async def test_errors(settings: dict[str, Any], change: Any, kind: type[openai.APIStatusError], code: str) -> None:
    chat = ChatOpenAI(**settings | change)
    with pytest.raises(kind) as caught:
        chat.invoke(ASK)
    assert caught.value.code == code
    with pytest.raises(kind):
        [chunk async for chunk in chat.astream(ASK)]
