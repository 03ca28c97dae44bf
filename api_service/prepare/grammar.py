"""Structured output: what response_format, structured_outputs and guided_* ask for -> one checked GrammarSpec.

In: a body. Out: the grammar that the whole answer must match, or None; InvalidRequest naming the field for what is
malformed, cannot be compiled, never matches or is hostile. Blocking (a helper process tries the grammar): runs in a
preparation thread.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from api_service.prepare.model import ServedModel
from api_service.schemas.common import GenerationBody
from shared.errors import InvalidRequest
from shared.grammars.backend import GrammarError
from shared.grammars.checker import MAX_DEPTH, GrammarChecker
from shared.grammars.repeats import check_pattern, patterns_of
from shared.params import GrammarSpec

__all__ = ["check_grammar", "choice_pattern", "json_schema_spec", "output_grammar", "pattern_literal"]

_MAX_CHOICES = 10_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OBJECT = {"type": "object"}
_FORMAT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema", "strict"),
}
"""What may stand beside `response_format.type`."""

Found = tuple[str, GrammarSpec]
"""The field that asked, and what it asked for."""

_checker = GrammarChecker()
atexit.register(_checker.close)


def output_grammar(body: GenerationBody, model: ServedModel) -> GrammarSpec | None:
    """Raises InvalidRequest."""
    found = [item for item in (_response_format(body.response_format), *_structured(body)) if item is not None]
    if not found:
        return None
    if len(found) > 1:
        raise InvalidRequest(f"'{found[0][0]}' and '{found[1][0]}' cannot both be given.", param=found[1][0])
    param, spec = found[0]
    check_grammar(spec, param, model)
    return spec


def check_grammar(spec: GrammarSpec, param: str, model: ServedModel) -> None:
    """Raises InvalidRequest naming `param` when no worker could use the grammar."""
    if not model.card.eos_token_ids:
        raise InvalidRequest("This model has no end token, so its output cannot follow a grammar.", param=param)
    try:
        _checker.check(spec)
    except GrammarError as error:
        raise _unusable(param, error) from None


def json_schema_spec(schema: object, param: str) -> GrammarSpec:
    """A JSON schema that is an object, not too deep, with no pattern that counts too far. Raises InvalidRequest."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"'{param}' must be a JSON schema, which is an object.", param=param)
    try:
        _walk(schema)
        return GrammarSpec("json_schema", msgspec.json.encode(schema).decode())
    except GrammarError as error:
        raise _unusable(param, error) from None


def choice_pattern(choices: list[str]) -> str:
    """A regular expression that matches these texts and nothing else."""
    return "|".join(map(pattern_literal, choices))


def pattern_literal(text: str) -> str:
    """A regular expression that matches just this text."""
    plain = [char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text]
    return "".join(plain)


def _unusable(param: str, error: GrammarError) -> InvalidRequest:
    return InvalidRequest(f"'{param}' cannot be used: {error}.", param=param)


def _walk(schema: dict[str, Any]) -> None:
    """Raises GrammarError for a schema that is too deep or has a pattern that counts too far."""
    pending: list[tuple[int, Any]] = [(0, schema)]
    while pending:
        depth, node = pending.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema is nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, list):
            pending += ((depth + 1, item) for item in node)
        elif isinstance(node, dict):
            pending += ((depth + 1, item) for item in node.values())
            for pattern in patterns_of(node):
                check_pattern(pattern)


def _response_format(given: Mapping[str, Any] | None) -> Found | None:
    """OpenAI's field. The schema may also stand beside `type` without its wrapper, as llama.cpp has it."""
    if given is None:
        return None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        why = "'response_format.type' must be 'text', 'json_object' or 'json_schema'."
        raise InvalidRequest(why, param="response_format.type")
    _check_beside(given, kind)
    if kind == "text":
        return None
    schema = given.get("schema")
    if kind == "json_object":
        return "response_format.schema", json_schema_spec(
            _OBJECT if schema is None else schema, "response_format.schema"
        )
    wrapper = given.get("json_schema")
    if wrapper is None and schema is not None:
        return "response_format.schema", json_schema_spec(schema, "response_format.schema")
    if not isinstance(wrapper, dict):
        param = "response_format.json_schema"
        raise InvalidRequest(f"'{param}' must be an object with 'name' and 'schema'.", param=param)
    _check_wrapper(wrapper)
    param = "response_format.json_schema.schema"
    return param, json_schema_spec(wrapper.get("schema"), param)


def _check_beside(given: Mapping[str, Any], kind: str) -> None:
    """Nothing that would be dropped: a schema beside the wrong type, two schemas, a misspelt key."""
    for name, value in given.items():
        if name != "type" and name not in _FORMAT_FIELDS[kind] and value is not None:
            param = f"response_format.{name[:64]}"
            raise InvalidRequest(f"'{param}' has no meaning with the type '{kind}'.", param=param)
    if given.get("json_schema") is not None and given.get("schema") is not None:
        why = "'response_format.json_schema' and 'response_format.schema' cannot both be given."
        raise InvalidRequest(why, param="response_format.schema")


def _check_wrapper(wrapper: Mapping[str, Any]) -> None:
    name, strict = wrapper.get("name"), wrapper.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        param = "response_format.json_schema.name"
        raise InvalidRequest(f"'{param}' must have 1 to 64 letters, digits, '_' or '-'.", param=param)
    if strict is not None and not isinstance(strict, bool):
        param = "response_format.json_schema.strict"
        raise InvalidRequest(f"'{param}' must be true or false.", param=param)


def _structured(body: GenerationBody) -> list[Found | None]:
    """vLLM's field and its older names."""
    given = {f"guided_{name}": getattr(body, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
    for name, value in (body.structured_outputs or {}).items():
        if name not in _READERS and value is not None and value is not False:
            param = f"structured_outputs.{name[:64]}"
            raise InvalidRequest(f"'{param}' is not supported here.", param=param)
        given[f"structured_outputs.{name}"] = value
    found = [_read(param, value) for param, value in given.items() if value is not None]
    asks = any(item is not None and item[0].startswith("structured_outputs.") for item in found)
    if body.structured_outputs is not None and not asks:
        names = ", ".join(f"'{name}'" for name in _READERS)
        raise InvalidRequest(f"'structured_outputs' must name one of {names}.", param="structured_outputs")
    return found


def _read(param: str, value: object) -> Found | None:
    name = param.removeprefix("structured_outputs.").removeprefix("guided_")
    spec = _READERS[name](value, param) if name in _READERS else None
    return None if spec is None else (param, spec)


def _json(value: object, param: str) -> GrammarSpec:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(f"'{param}' is not valid JSON.", param=param) from None
    return json_schema_spec(value, param)


def _json_object(value: object, param: str) -> GrammarSpec | None:
    return json_schema_spec(_OBJECT, param) if value is True else None


def _regex(value: object, param: str) -> GrammarSpec:
    pattern = _text(value, param)
    try:
        check_pattern(pattern)
    except GrammarError as error:
        raise _unusable(param, error) from None
    return GrammarSpec("regex", pattern)


def _choice(value: object, param: str) -> GrammarSpec:
    fits = isinstance(value, list) and 0 < len(value) <= _MAX_CHOICES and all(isinstance(item, str) for item in value)
    if not isinstance(value, list) or not fits:
        raise InvalidRequest(f"'{param}' must be a list of 1 to {_MAX_CHOICES} strings.", param=param)
    return GrammarSpec("regex", choice_pattern(value))


def _grammar(value: object, param: str) -> GrammarSpec:
    return GrammarSpec("lark", _text(value, param))


def _text(value: object, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"'{param}' must be a string that is not empty.", param=param)
    return value


_READERS: Mapping[str, Callable[[object, str], GrammarSpec | None]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
