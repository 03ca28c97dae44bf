"""pydantic-ai's agents: text, structured output in its two enforced ways, a tool that is really called, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.e2e.clients.conftest import CAPITAL, KEY
from tests.e2e.conftest import REAL_MODEL
from tests.support.stack import Pod

pytestmark = pytest.mark.real_model

SETTINGS = ModelSettings(temperature=0, max_tokens=64)


class Color(BaseModel):
    color: Literal["teal"]


@dataclasses.dataclass
class CallFirst(AbstractCapability[Any]):
    """The model must call a tool first and may not call one afterwards."""

    def get_model_settings(self) -> Callable[[RunContext[Any]], ModelSettings]:
        return lambda context: ModelSettings(tool_choice="required" if context.run_step == 1 else "none")


@pytest.fixture
async def client(pod: Pod) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=pod.base_url, api_key=KEY, max_retries=0) as client:
        yield client


def model(client: openai.AsyncOpenAI, name: str = REAL_MODEL) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))


async def test_text_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    agent = Agent(model(client), instructions="Be brief.", model_settings=SETTINGS)
    whole = await agent.run(CAPITAL)
    async with agent.run_stream(CAPITAL) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "Paris" in whole.output == "".join(pieces)
    assert len(pieces) > 3
    assert whole.usage.output_tokens == stream.usage.output_tokens > 0


@pytest.mark.parametrize("output", [NativeOutput(Color, strict=True), ToolOutput(Color, strict=True)])
async def test_structured_output(client: openai.AsyncOpenAI, output: Any) -> None:
    agent = Agent(model(client), output_type=output, retries=0, model_settings=SETTINGS)
    assert (await agent.run("color?")).output == Color(color="teal")
    async with agent.run_stream("color?") as stream:
        assert await stream.get_output() == Color(color="teal")


async def test_a_tool_is_called_and_its_result_read(client: openai.AsyncOpenAI) -> None:
    calls = []
    agent = Agent(model(client), model_settings=SETTINGS, capabilities=[CallFirst()])

    @agent.tool_plain(strict=True)
    def pick_color(color: Literal["teal"]) -> str:
        """Picks."""
        calls.append(color)
        return f"{color} it is"

    result = await agent.run("color?")
    assert calls == ["teal"]
    assert result.output
    assert result.usage.requests == 2


@pytest.mark.parametrize(
    ("name", "key", "settings", "status"),
    [("no-such", KEY, {}, 404), (REAL_MODEL, "sk-wrong", {}, 401), (REAL_MODEL, KEY, {"temperature": 9}, 400)],
)
async def test_errors(client: openai.AsyncOpenAI, name: str, key: str, settings: Any, status: int) -> None:
    agent = Agent(model(client.with_options(api_key=key), name), model_settings=settings)
    with pytest.raises(ModelHTTPError) as caught:
        await agent.run("Hi")
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"]
