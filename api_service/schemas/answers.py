"""What chat and text completions answer, as types for the OpenAPI document: exactly the keys that are sent, no other.

In: nothing. Out: TypedDicts; a key that is `NotRequired` is left out where it has nothing to say. The routes write
their JSON themselves; a test holds it against these types.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

__all__ = ["ChatCompletion", "ChatCompletionChunk", "TextCompletion", "TextCompletionChunk"]

_EXACT = ConfigDict(extra="forbid")


@with_config(_EXACT)
class CachedTokens(TypedDict):
    cached_tokens: int


@with_config(_EXACT)
class ReasoningTokens(TypedDict):
    reasoning_tokens: int


@with_config(_EXACT)
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]


@with_config(_EXACT)
class Alternative(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@with_config(_EXACT)
class ChatLogprob(Alternative):
    top_logprobs: list[Alternative]


@with_config(_EXACT)
class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


@with_config(_EXACT)
class CalledFunction(TypedDict):
    name: str
    arguments: str


@with_config(_EXACT)
class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@with_config(_EXACT)
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[Call]]


@with_config(_EXACT)
class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: NotRequired[str | int]
    token_ids: NotRequired[list[int]]


@with_config(_EXACT)
class PromptToken(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


@with_config(_EXACT)
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: NotRequired[Literal["default", "flex"]]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptToken] | None]]


@with_config(_EXACT)
class CallFragmentFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


@with_config(_EXACT)
class CallFragment(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CallFragmentFunction


@with_config(_EXACT)
class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallFragment]]


@with_config(_EXACT)
class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: NotRequired[str | int]
    token_ids: NotRequired[list[int]]


@with_config(_EXACT)
class ChatCompletionChunk(TypedDict):
    """One event of a stream; its `id:` line resumes the stream after it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: NotRequired[Literal["default", "flex"]]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


@with_config(_EXACT)
class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


@with_config(_EXACT)
class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: NotRequired[str | int]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptToken] | None]]


@with_config(_EXACT)
class TextCompletion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: NotRequired[Literal["default", "flex"]]
    choices: list[TextChoice]
    usage: Usage


@with_config(_EXACT)
class TextChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: NotRequired[str | int]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


@with_config(_EXACT)
class TextCompletionChunk(TypedDict):
    """One event of a stream; its `id:` line resumes the stream after it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: NotRequired[Literal["default", "flex"]]
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage | None]
