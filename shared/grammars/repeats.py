"""How often a pattern may repeat something: a short text must not stand for an automaton of millions of states.

In: a regular expression, a JSON schema's node, or a Lark grammar. Out: nothing, or GrammarError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from shared.grammars.errors import GrammarError

__all__ = ["MAX_REPEATS", "check_lark", "check_pattern", "patterns_of"]

MAX_REPEATS = 10_000
"""Largest number in a pattern's `{n,m}`."""
_REPEATS = re.compile(
    r"""\\[xuUpP]\{\w*\}                         # a character by its number, or a class by its name
    | \\.                                     # another escape; an escaped brace repeats nothing
    | (?P<lone>\\)                            # at the end
    | \{\s*(?P<least>\d*)\s*(?:,\s*(?P<most>\d*)\s*)?\}""",
    re.VERBOSE | re.DOTALL,
)
_LARK = re.compile(
    r"""%json\b\s*(?P<schema>(?=\{))
    | "(?:\\.|[^"\\\n])*"
    | (?://|\#)[^\n]*                         # a comment; no pattern is empty
    | /(?P<pattern>(?:\\.|[^/\\])+)/""",
    re.VERBOSE | re.DOTALL,
)
_decoder = json.JSONDecoder()


def check_pattern(pattern: str) -> None:
    """Raises GrammarError when a repetition counts too far, or for a last backslash, which llguidance would drop."""
    for match in _REPEATS.finditer(pattern):
        if match["lone"]:
            raise GrammarError("invalid regex: it ends with a backslash that escapes nothing")
        for number in match.group("least", "most"):
            if number and (len(number) > 9 or int(number) > MAX_REPEATS):
                raise GrammarError(f"a pattern repeats more than {MAX_REPEATS} times")


def patterns_of(node: dict[str, Any]) -> Iterator[str]:
    """The patterns that one node of a JSON schema has itself."""
    names = node.get("patternProperties")
    for pattern in (node.get("pattern"), *(names if isinstance(names, dict) else ())):
        if isinstance(pattern, str):
            yield pattern


def check_lark(text: str) -> None:
    """As `check_pattern`, for every pattern of a Lark grammar and of the schemas in it.

    What is no valid Lark is passed over: whoever compiles it says what is wrong.
    """
    place = 0
    while (found := _LARK.search(text, place)) is not None:
        place = found.end()
        if found["pattern"]:
            check_pattern(found["pattern"])
        elif found["schema"] is not None:
            place = _check_schema(text, place)


def _check_schema(text: str, start: int) -> int:
    """Checks the schema that begins here -> where it ends; `start` where it is no JSON."""
    try:
        schema, end = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return start
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            pending += node.values()
            for pattern in patterns_of(node):
                check_pattern(pattern)
    return end
