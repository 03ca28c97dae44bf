"""Types of single fields: what JSON they take, how they read it, and the schema that the OpenAPI document shows.

In: a value of a body. Out: the same in one spelling, or a ValueError whose words are the client's. By hand where
pydantic would list an error for each of a thousand items.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

__all__ = ["WHOLE", "AllowedIds", "Bias", "Format", "JsonSchema", "Stops", "TokenIds", "Words"]

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_IDS = 1024
"""Entries of logit_bias and of stop_token_ids."""
MAX_BAD_WORDS = 256
MAX_ALLOWED_IDS = 65_536


def _whole(value: object) -> object:
    """JSON has one kind of number: 16.0 is the integer 16."""
    return int(value) if type(value) is float and value.is_integer() else value


WHOLE = BeforeValidator(_whole)


def _stops(value: object) -> object:
    """str | list of str -> tuple. An empty string would match everywhere."""
    stops = (value,) if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings (token ids go into stop_token_ids)")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _token_ids(value: object) -> object:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise ValueError("must be a list of token ids")
    if len(value) > MAX_IDS:
        raise ValueError(f"at most {MAX_IDS} token ids are allowed")
    return tuple(value)


def _words(value: object) -> object:
    """A list of words -> tuple. One that is empty or white space would forbid everything or nothing."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise ValueError("must be a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise ValueError(f"at most {MAX_BAD_WORDS} words are allowed")
    if not all(word.strip() and len(word) <= MAX_STOP_LENGTH for word in value):
        raise ValueError(f"a word has 1 to {MAX_STOP_LENGTH} characters, not only white space")
    return tuple(value)


def _allowed(value: object) -> object:
    """A non-empty list of token ids; null allows all."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(type(item) is int for item in value):
        raise ValueError("must be a list of one or more token ids")
    if len(value) > MAX_ALLOWED_IDS:
        raise ValueError(f"at most {MAX_ALLOWED_IDS} token ids are allowed")
    return tuple(value)


def _schema(value: object) -> object:
    """An object or its JSON text. One check here, so that an error names the field and not a branch of the union."""
    if value is not None and not isinstance(value, dict | str):
        raise ValueError("must be a JSON schema: an object, or a string that holds one")
    return value


def _bias(value: object) -> object:
    """{"token id": -100 … 100} -> {int: float}."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_IDS:
        raise ValueError(f"must be an object of at most {MAX_IDS} token ids")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not isinstance(key, str) or not key.isascii() or not key.isdigit() or len(key) > 10:
            raise ValueError('keys must be token ids, such as "42"')
        if type(number) not in (int, float) or not -100 <= number <= 100:
            raise ValueError("values must be numbers from -100 to 100")
        bias[int(key)] = float(number)
    return bias


def _listed(item: dict[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    """JSON schema of a list, or null."""
    return {"anyOf": [{"type": "array", "items": item, "minItems": least, "maxItems": most}, {"type": "null"}]}


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_WORD = {"type": "string", "pattern": r"\S", "maxLength": MAX_STOP_LENGTH}
_ID = {"type": "integer", "minimum": 0}
_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_IDS,
        },
        {"type": "null"},
    ]
}
_FORMAT_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
        {"type": "null"},
    ]
}

Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [_STOP, *_listed(_STOP, MAX_STOPS)["anyOf"]]}),
]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(_token_ids), WithJsonSchema(_listed(_ID, MAX_IDS))]
AllowedIds = Annotated[
    tuple[int, ...] | None, BeforeValidator(_allowed), WithJsonSchema(_listed(_ID, MAX_ALLOWED_IDS, least=1))
]
Words = Annotated[tuple[str, ...], BeforeValidator(_words), WithJsonSchema(_listed(_WORD, MAX_BAD_WORDS))]
Bias = Annotated[dict[int, float], BeforeValidator(_bias), WithJsonSchema(_BIAS_SCHEMA)]
Format = Annotated[dict[str, Any] | None, WithJsonSchema(_FORMAT_SCHEMA)]
JsonSchema = Annotated[dict[str, Any] | str | None, BeforeValidator(_schema)]
