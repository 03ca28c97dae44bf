"""Chat template -> text -> token ids, with user text kept apart from the template's control tokens.

In: messages (dicts of plain JSON types) and a ServedModel. Out: token ids. Runs in a worker thread; a template that
runs too long is stopped at its next line (by a trace function: threads cannot be killed), its errors become the
caller's 400.
"""

from __future__ import annotations

import inspect
import sys
import time
from dataclasses import replace
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from api_service.prepare import template_child
from api_service.prepare.model import ServedModel
from api_service.prepare.renderer import encode_marked_chat, mark_control_tokens, render_jinja_template
from api_service.prepare.template_child import TemplateFailed, TemplateTooLong
from shared.errors import InvalidRequest

__all__ = ["RENDER_LIMIT_S", "encode_chat", "render_chat", "with_template"]

RENDER_LIMIT_S = 2.0
_TEMPLATE_FILE = "<template>"
_MESSAGE_LENGTH = 200
_RESERVED = frozenset(inspect.signature(render_jinja_template).parameters) | {"messages"}
"""Names that the renderer itself sets."""
_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _TooLong(BaseException):
    """Not an Exception, so that nothing inside the template can swallow it."""


def encode_chat(model: ServedModel, text: str) -> list[int]:
    """Token ids of a rendered chat, marked control tokens as plain text. Adds no BOS: templates write their own."""
    if model.parses_control_tokens:
        return model.vocabulary.encode(text)
    try:
        ids: list[int] = encode_marked_chat(model.vocabulary, text)
    except ValueError:
        why = "A message holds a control token that this model cannot read as text."
        raise InvalidRequest(why, param="messages") from None
    return ids


def render_chat(
    model: ServedModel,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    kwargs: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    limit_s: float = RENDER_LIMIT_S,
) -> str:
    """The chat as one text, control tokens of user strings wrapped in transformers' private-use markers.

    Raises InvalidRequest when the model has no template, or when the template refuses, fails or takes too long.
    """
    if not model.template:
        why = f"The model '{model.card.name}' has no chat template; use /v1/completions."
        raise InvalidRequest(why, param="messages")
    _check_names(model, kwargs)
    marked: list[dict[str, Any]] = _mark(messages, model)
    if continue_final_message and not marked[-1]["content"].strip():
        # Nothing that the renderer could find again: the opening of a turn, then the white space.
        opened = render_chat(
            model,
            messages[:-1],
            add_generation_prompt=True,
            continue_final_message=False,
            kwargs=kwargs,
            tools=tools,
            limit_s=limit_s,
        )
        space: str = marked[-1]["content"]
        return opened + space
    try:
        chat = _render(
            model,
            {
                "conversations": [marked],
                "tools": _mark(tools, model) if tools else None,
                "chat_template": model.template,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                **model.card.special_tokens,
                **_mark(kwargs, model),
            },
            limit_s,
        )
    except (_TooLong, TemplateTooLong) as error:
        param = "messages" if isinstance(error, _TooLong) else "chat_template"
        raise InvalidRequest("The chat template took too long on these messages.", param=param) from None
    except _TEMPLATE_ERRORS as error:
        raise InvalidRequest(f"The chat template refuses these messages: {_reason(error)}", param="messages") from None
    except TemplateFailed as error:
        raise InvalidRequest(f"The chat template refuses these messages: {error}", param="chat_template") from None
    return _keep_trailing_space(chat, marked[-1]["content"]) if continue_final_message else chat


def _check_names(model: ServedModel, kwargs: dict[str, Any]) -> None:
    taken = sorted((_RESERVED | model.card.special_tokens.keys()) & kwargs.keys())
    if taken:
        raise InvalidRequest(f"'chat_template_kwargs' must not set '{taken[0]}'.", param="chat_template_kwargs")


def _render(model: ServedModel, arguments: dict[str, Any], limit_s: float) -> str:
    """The model's own template here, whose loops end at their next line; a client's in a process that can be killed."""
    if model.foreign_literal is not None:
        return template_child.render(arguments, limit_s)
    with _TimeLimit(limit_s):
        rendered, _ = render_jinja_template(**arguments)
    chat: str = rendered[0]
    return chat


def with_template(model: ServedModel, template: str) -> ServedModel:
    """The model with a template that a client sent. Raises InvalidRequest for one that cannot be parsed."""
    try:
        literal = template_child.literal_text(template, RENDER_LIMIT_S)
    except TemplateTooLong:
        raise InvalidRequest("'chat_template' takes too long to compile.", param="chat_template") from None
    except TemplateFailed as error:
        raise InvalidRequest(f"'chat_template' is no template: {error}", param="chat_template") from None
    return replace(model, template=template, foreign_literal=literal)


def _reason(error: BaseException) -> str:
    """A template's own words (raise_exception), or only the kind of failure: never source lines or quoted input."""
    if isinstance(error, TemplateError) and error.message:
        return error.message.splitlines()[0][:_MESSAGE_LENGTH]
    return f"{type(error).__name__} in the template"


def _keep_trailing_space(text: str, final: str) -> str:
    """Templates that trim messages trim the one to be continued too, but its white space is part of the prefill."""
    if text.endswith(final):
        return text
    return text.rstrip() + final[len(final.rstrip()) :]


def _mark(value: Any, model: ServedModel) -> Any:
    """`mark_control_tokens`, for keys of nested objects (tool arguments) as well."""
    if model.parses_control_tokens:
        return value
    if isinstance(value, str):
        return mark_control_tokens(value, model.control_pattern)
    if isinstance(value, dict):
        return {_mark(key, model): _mark(item, model) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, model) for item in value]
    return value


class _TimeLimit:
    """Raises _TooLong in this thread at the next template line after `limit_s`. Traces lines of templates only."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._end = 0.0
        self._previous: Any = None

    def __enter__(self) -> None:
        self._end = time.monotonic() + self._limit_s
        self._previous = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)

    def _trace(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code.co_filename != _TEMPLATE_FILE:
            return None
        if time.monotonic() > self._end:
            raise _TooLong
        return self._trace
