"""litellm, with both of the names that it has for servers like ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import litellm
import openai
import pytest
from litellm.llms.custom_httpx.http_handler import HTTPHandler
from pydantic import BaseModel

from tests.e2e.clients.conftest import CAPITAL, KEY, TOOL
from tests.e2e.conftest import REAL_MODEL
from tests.support.stack import Pod

pytestmark = [
    pytest.mark.real_model,
    # its first call imports another provider's module, on whose types pydantic remarks
    pytest.mark.filterwarnings("ignore:Items? .* (is|are) using the `ReadOnly` qualifier:UserWarning"),
    # it looks at every attribute of a stream's deltas, by names that pydantic has moved
    pytest.mark.filterwarnings(
        "ignore:Accessing the 'model_.*' attribute on the instance:pydantic.warnings.PydanticDeprecatedSince211"
    ),
]


class Color(BaseModel):
    color: Literal["teal"]


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    """litellm keeps its connections for as long as the process lives, and would make an event loop that nobody ends:
    with this it is told that the thread has none."""
    asyncio.set_event_loop(None)
    yield
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        if isinstance(client, openai.OpenAI | HTTPHandler):
            client.close()


@pytest.fixture(params=["openai", "hosted_vllm"])
def body(request: pytest.FixtureRequest, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    server = {"model": f"{request.param}/{REAL_MODEL}", "api_base": pod.base_url, "api_key": KEY, "max_retries": 0}
    return {**server, "messages": [{"role": "user", "content": CAPITAL}], "temperature": 0, "max_tokens": 64}


def streamed(body: dict[str, Any]) -> Any:
    """The whole that litellm builds of a stream's chunks."""
    chunks = list(litellm.completion(**body, stream=True, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(chunks, messages=body["messages"])


def test_whole_and_streamed(body: dict[str, Any]) -> None:
    whole, joined = litellm.completion(**body), streamed(body)
    assert "Paris" in whole.choices[0].message.content
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert joined.usage.total_tokens == whole.usage.total_tokens > 0


async def test_async(body: dict[str, Any]) -> None:
    whole = await litellm.acompletion(**body)
    chunks = [chunk async for chunk in await litellm.acompletion(**body, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    await litellm.close_litellm_async_clients()


def test_tools(body: dict[str, Any]) -> None:
    body |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    for answer in (litellm.completion(**body), streamed(body)):
        assert answer.choices[0].finish_reason == "tool_calls"
        [call] = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("pick_color", {"color": "teal"})


def test_structured_output(body: dict[str, Any]) -> None:
    for answer in (litellm.completion(**body, response_format=Color), streamed(body | {"response_format": Color})):
        assert Color.model_validate_json(answer.choices[0].message.content) == Color(color="teal")
    extra = {"guided_choice": ["north", "south"]}
    assert litellm.completion(**body, extra_body=extra).choices[0].message.content in ("north", "south")


def test_text_completions_and_embeddings(body: dict[str, Any]) -> None:
    del body["messages"]
    text = body | {"prompt": "The capital of France is", "max_tokens": 4}
    if text["model"].startswith("openai/"):
        text["model"] = f"text-completion-{text['model']}"
    whole = litellm.text_completion(**text).choices[0].text
    assert whole.startswith(" Paris")
    assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**text, stream=True)) == whole
    del body["temperature"], body["max_tokens"]
    answer = litellm.embedding(**body, input=["A cat.", "Tax law"])
    assert [len(entry["embedding"]) for entry in answer.data] == [576, 576]
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"model": "no-such"}, litellm.NotFoundError),
        ({"temperature": 9}, litellm.BadRequestError),
        ({"api_key": "sk-wrong"}, litellm.AuthenticationError),
        ({"max_tokens": 9000}, litellm.ContextWindowExceededError),
    ],
)
def test_errors(body: dict[str, Any], change: dict[str, Any], kind: type[Exception]) -> None:
    if "model" in change:
        change = {"model": body["model"].replace(REAL_MODEL, change["model"])}
    with pytest.raises(kind) as caught:
        litellm.completion(**body | change)
    assert type(caught.value) is kind
    with pytest.raises(kind):
        streamed(body | change)
