"""A chat body -> GenerateRequest. Pure and blocking: runs in a thread of the preparation pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec.structs import replace as replace_struct

from api_service.prepare.extensions import extensions, truncated
from api_service.prepare.limits import answer_limit, check_text_length
from api_service.prepare.model import ServedModel
from api_service.prepare.render import encode_chat, render_chat, with_template
from api_service.prepare.sampling import check_possible, sampling_params, stop_conditions
from api_service.prepare.tools import (
    answer_reading,
    call_grammar,
    fitted,
    has_tools_branch,
    needs_special_tokens,
)
from api_service.schemas.chat import ChatCompletionRequest, FunctionCall, Message
from shared.errors import InvalidRequest
from shared.messages import GenerateRequest

__all__ = ["ChatOptions", "prepare_chat"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the pod's operator decides of the reading of chats."""

    trust_template: bool = False
    """Whether clients may bring a chat template."""
    parse_control_tokens: bool = False
    """What holds where the body does not say."""


def prepare_chat(
    body: ChatCompletionRequest, model: ServedModel, options: ChatOptions | None = None
) -> GenerateRequest:
    """The request without id, tenant and times, which the route adds. Raises InvalidRequest and its kind."""
    options = options or ChatOptions()
    body.check()
    model = _with_own_template(model, body.chat_template, options.trust_template)
    if options.parse_control_tokens if body.parse_control_tokens is None else body.parse_control_tokens:
        model = replace(model, parses_control_tokens=True)
    check_text_length(model, "".join(message.content or "" for message in body.messages), "messages")
    continues = bool(body.continue_final_message)
    adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    offer = body.offer()
    messages = [_for_template(message, model.template) for message in body.messages]
    text = render_chat(
        model,
        fitted(messages, offer, model),
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        kwargs=_template_variables(body, model),
        tools=[function.definition for function in offer.functions] if has_tools_branch(model) else [],
    )
    reading = answer_reading(offer, model, text)
    check_text_length(model, text, "messages")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ids = truncated(body, encode_chat(model, text), model, asked)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = answer_limit(model, len(ids), asked, default=None, param="messages", asked_param=name)
    sampling = sampling_params(body, model, (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs)
    stop = stop_conditions(body, model, max_tokens)
    if sampling.grammar is not None and reading is not None:  # the grammar has no room for reasoning before the answer
        reading = replace_struct(reading, think="")
    enforced = call_grammar(offer, model)
    if enforced is not None:  # an answer that has to be a call has no content that response_format could speak of
        sampling = replace(sampling, grammar=enforced)
    elif needs_special_tokens(reading, model):
        stop = replace(stop, skip_special_tokens=False)
    check_possible(sampling, stop, model)
    return GenerateRequest(
        rid="",
        model=model.card.name,
        prompts=(tuple(ids),),
        sampling=sampling,
        stop=stop,
        reading=reading,
        n=body.n or 1,
        kind="chat",
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        fingerprint=model.card.fingerprint,
        tokenizer=model.card.tokenizer,
        **extensions(body),
    )


def _with_own_template(model: ServedModel, template: str | None, trusted: bool) -> ServedModel:
    if template is None:
        return model
    if not trusted:
        why = "'chat_template' is not accepted here; the server's switch is --trust-request-chat-template."
        raise InvalidRequest(why, param="chat_template")
    return with_template(model, template)


def _template_variables(body: ChatCompletionRequest, model: ServedModel) -> dict[str, Any]:
    """Raises InvalidRequest for an effort that nothing would come of."""
    given, effort = body.chat_template_kwargs or {}, body.reasoning_effort
    if effort is None or effort == "none":
        return given
    if "reasoning_effort" not in model.template:
        why = f"The model '{model.card.name}' has no reasoning effort to choose; only 'none' is accepted."
        raise InvalidRequest(why, param="reasoning_effort")
    return {"reasoning_effort": effort} | given


def _for_template(message: Message, template: str) -> dict[str, Any]:
    """The message as templates expect it: text content, developer as system, tool arguments as an object."""
    role: str = message.role
    if role == "developer" and "developer" not in template:
        role = "system"
    if role in ("tool", "function"):
        role = "tool"
    entry: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.calls:
        entry["tool_calls"] = [
            {"type": "function", "id": call.id or "", "function": _function(call.function)} for call in message.calls
        ]
    optional = {key: getattr(message, key) for key in ("name", "tool_call_id")}
    optional["reasoning_content"] = message.reasoning_content or message.reasoning
    return entry | {key: value for key, value in optional.items() if value is not None}


def _function(call: FunctionCall) -> dict[str, Any]:
    """Templates write arguments with `tojson`; a string would be quoted a second time."""
    try:
        parsed = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    return {"name": call.name, "arguments": parsed if isinstance(parsed, dict) else call.arguments}
