"""Random JSON schemas of the kinds people use: nested objects, enums, unicode, numbers, arrays, unions, references."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["random_schema"]

_NAMES = ["name", "größe", "日本", "a b", "tag's", "🫠", "x1", 'quote"d', "back\\slash", "id"]


def random_schema(seed: int) -> dict[str, Any]:
    """An object schema that an answer of some hundred tokens can satisfy; the same for the same seed."""
    rng = random.Random(seed)
    definitions: dict[str, Any] = {f"d{i}": _leaf(rng) for i in range(rng.randint(0, 2))}
    schema = _object(rng, 2, list(definitions))
    return schema | ({"$defs": definitions} if definitions else {})


def _node(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    if refs and rng.random() < 0.15:
        return {"$ref": f"#/$defs/{rng.choice(refs)}"}
    kind = rng.random()
    if depth and kind < 0.2:
        return _object(rng, depth - 1, refs)
    if depth and kind < 0.35:
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": _node(rng, depth - 1, refs),
            "minItems": low,
            "maxItems": low + rng.randint(0, 2),
        }
    if depth and kind < 0.45:
        return {"anyOf": [_leaf(rng), {"type": "null"}]}
    return _leaf(rng)


def _object(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 3))
    properties = {name: _node(rng, depth, refs) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 9)},
            {"type": "integer", "minimum": 0, "maximum": 10_000, "multipleOf": 5},
            {"type": "string", "maxLength": rng.randint(1, 8)},
            {
                "type": "string",
                "pattern": rng.choice(["^[a-z]{2,5}$", "^[0-9]{3}-[0-9]{2}$", "^(x|yy|é)+$"]),
                "maxLength": 8,
            },
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
            {"enum": rng.sample(["red", "grün", "日本🫠", 'q"uote', "\\", "\n", 1, 2.5, None, True], 3)},
            {"const": rng.choice(["teal", "é\u2028", 0, -1.5, False])},
        ]
    )
