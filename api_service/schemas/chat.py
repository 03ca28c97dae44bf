"""Body of POST /v1/chat/completions.

In: the JSON object. Out: messages with text content only (parts joined by a newline, as vLLM does); roles checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from api_service.schemas.common import Body, GenerationBody
from api_service.schemas.tools import Offer, read_offer
from api_service.schemas.values import WHOLE
from shared.errors import InvalidRequest

__all__ = ["ChatCompletionRequest", "Message", "ToolCall"]

MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 10_000
MAX_TEMPLATE = 65_536


def _content_text(value: object) -> object:
    """Text of a message's content: a string, or parts of type text (or refusal) joined by newlines; null stays null."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a non-empty list of content parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if kind is not None and kind not in ("text", "refusal"):
            raise ValueError(f"part {i} is not of type 'text'; this model reads text only")
        if not isinstance(text, str):
            raise ValueError(f"part {i} must be an object with 'type': 'text' and a string 'text'")
        texts.append(text)
    return "\n".join(texts)


_PART_SCHEMAS = [
    {"type": "object", "properties": {"type": {"const": kind}, kind: {"type": "string"}}, "required": ["type", kind]}
    for kind in ("text", "refusal")
]
_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": _PART_SCHEMAS}, "minItems": 1},
        {"type": "null"},
    ]
}


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = "{}"


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn. Keys we do not know (refusal, annotations, cache_control, …) are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | None,
        BeforeValidator(_content_text),
        WithJsonSchema(_CONTENT_SCHEMA),
    ] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    """The old way to have one call; means the same as `tool_calls` with one entry."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for it."""

    @property
    def calls(self) -> list[ToolCall]:
        old = [] if self.function_call is None else [ToolCall(function=self.function_call)]
        return [*(self.tool_calls or ()), *old]


class ChatCompletionRequest(GenerationBody):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Wins over max_tokens, its old name."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    """Instead of the model's own, where the pod's operator allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    parse_control_tokens: bool | None = None
    """True: control tokens that messages spell out are such, not text. Ours; the default is the pod's setting."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Handed to a template that reads it; of other models only "none" can be asked."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """Read by schemas/tools.py, all three."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.UNSUPPORTED,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "documents": ([],),
        "echo": (False,),
        "add_special_tokens": (False,),
        "mm_processor_kwargs": (),
        "moderation": (),
    }

    def offer(self) -> Offer:
        """The functions that may be called. Raises InvalidRequest."""
        return read_offer(self.tools, self.tool_choice, self.parallel_tool_calls)

    def check(self) -> None:
        """Rules that span fields. Raises InvalidRequest."""
        self.check_stream_options()
        self.offer()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        for i, message in enumerate(self.messages):
            _check_message(message, f"messages[{i}]")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequest(
                    "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                    param="continue_final_message",
                )
            if self.messages[-1].role != "assistant" or self.messages[-1].content is None:
                raise InvalidRequest(
                    "'continue_final_message' needs a last message of the assistant with text.",
                    param="continue_final_message",
                )


def _check_message(message: Message, path: str) -> None:
    if message.content is None and not (message.role == "assistant" and message.calls):
        why = f"'{path}.content' must be text (only tool calls may come without)."
        raise InvalidRequest(why, param=f"{path}.content")
    if message.calls and message.role != "assistant":
        raise InvalidRequest("Only assistant messages can hold tool calls.", param=f"{path}.tool_calls")
