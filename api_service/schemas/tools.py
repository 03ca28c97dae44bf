"""`tools`, `tool_choice` and what they offer: parsed by hand, so that every error names its place.

In: the two fields as they came. Out: `Offer`, or InvalidRequest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import InvalidRequest

__all__ = ["Function", "Offer", "read_offer"]

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    parameters: dict[str, Any]
    definition: dict[str, Any]
    """The entry of `tools` as it came, for the chat template."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions a model may call in this request. Without functions nothing is offered, whatever the choice."""

    functions: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    named: str = ""
    parallel: bool = True


def read_offer(tools: Sequence[object] | None, choice: object, parallel: bool | None) -> Offer:
    """null and [] are no tools; 'none' and 'auto' without tools are harmless. Raises InvalidRequest."""
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest(f"'tools' may name at most {MAX_TOOLS} functions.", param="tools")
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"'tools' names the function '{twice}' twice.", param="tools")
    named = _named(choice)
    if not functions and (named or choice == "required"):
        raise InvalidRequest("'tool_choice' asks for a call, but 'tools' names no function.", param="tool_choice")
    if named and named not in names:
        why = f"'tool_choice' names the function '{named[:64]}', which is not among 'tools'."
        raise InvalidRequest(why, param="tool_choice")
    if not functions or choice == "none":
        return Offer()
    kind: Literal["auto", "required", "named"] = "named" if named else "required" if choice == "required" else "auto"
    return Offer(functions, kind, named, parallel is not False)


def _named(choice: object) -> str:
    if choice is None or choice in _CHOICES:
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name or not isinstance(choice, dict) or choice.get("type") != "function":
        raise InvalidRequest(
            "'tool_choice' must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}.",
            param="tool_choice",
        )
    return name


def _function(tool: object, path: str) -> Function:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"'{path}' must be {{'type': 'function', 'function': {{…}}}}.", param=path)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        param = f"{path}.function.name"
        raise InvalidRequest(f"'{param}' must have 1 to 64 letters, digits, '_', '.' or '-'.", param=param)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        param = f"{path}.function.parameters"
        raise InvalidRequest(f"'{param}' must be a JSON schema, which is an object.", param=param)
    return Function(name, parameters or _NO_PARAMETERS, tool)
