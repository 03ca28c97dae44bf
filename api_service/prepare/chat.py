"""A chat body -> GenerateRequest. Pure and blocking: runs in a thread of the preparation pool."""

from __future__ import annotations

from typing import Any

import msgspec

from api_service.prepare.extensions import extensions, truncated
from api_service.prepare.limits import answer_limit, check_text_length
from api_service.prepare.model import ServedModel
from api_service.prepare.render import encode_chat, render_chat
from api_service.prepare.sampling import sampling_params, stop_conditions
from api_service.schemas.chat import ChatCompletionRequest, FunctionCall, Message
from shared.errors import InvalidRequest
from shared.messages import GenerateRequest

__all__ = ["prepare_chat"]


def prepare_chat(body: ChatCompletionRequest, model: ServedModel) -> GenerateRequest:
    """The request without id, tenant and times, which the route adds. Raises InvalidRequest and its kind."""
    body.check()
    check_text_length(model, "".join(message.content or "" for message in body.messages), "messages")
    continues = bool(body.continue_final_message)
    adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    text = render_chat(
        model,
        [_for_template(message, model.template, f"messages[{i}]") for i, message in enumerate(body.messages)],
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        kwargs=body.chat_template_kwargs or {},
    )
    check_text_length(model, text, "messages")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ids = truncated(body, encode_chat(model, text), model, asked)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = answer_limit(model, len(ids), asked, default=None, param="messages", asked_param=name)
    return GenerateRequest(
        rid="",
        model=model.card.name,
        prompts=(tuple(ids),),
        sampling=sampling_params(
            body, model, (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs
        ),
        stop=stop_conditions(body, model, max_tokens),
        n=body.n or 1,
        kind="chat",
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        fingerprint=model.card.fingerprint,
        tokenizer=model.card.tokenizer,
        **extensions(body),
    )


def _for_template(message: Message, template: str, path: str) -> dict[str, Any]:
    """The message as templates expect it: text content, developer as system, tool arguments as an object."""
    role: str = message.role
    if role == "developer" and "developer" not in template:
        role = "system"
    if role in ("tool", "function"):
        role = "tool"
        if "tool" not in template:
            raise InvalidRequest("This model's chat template has no tool messages.", param=f"{path}.role")
    entry: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.tool_calls:
        if "tool_calls" not in template:
            raise InvalidRequest("This model's chat template has no tool calls.", param=f"{path}.tool_calls")
        entry["tool_calls"] = [
            {"type": "function", "id": call.id or "", "function": _function(call.function)}
            for call in message.tool_calls
        ]
    optional = {key: getattr(message, key) for key in ("name", "tool_call_id", "reasoning_content")}
    return entry | {key: value for key, value in optional.items() if value is not None}


def _function(call: FunctionCall) -> dict[str, Any]:
    """Templates write arguments with `tojson`; a string would be quoted a second time."""
    try:
        parsed = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    return {"name": call.name, "arguments": parsed if isinstance(parsed, dict) else call.arguments}
