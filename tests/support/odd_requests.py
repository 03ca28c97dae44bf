"""Requests that are JSON and odd: wrong types, edges of every number, degenerate grammars, strange text, from a seed.

In: a seed. Out: path and bytes of a body, whole ones among them, each cheap to answer. It knows the public names of
the fields and nothing of the code that reads them; nor does `check_answer`, which says whether an answer is OpenAI's.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

__all__ = ["OddRequest", "check_answer", "odd_requests"]

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
PATHS = [CHAT] * 4 + [TEXT] * 4 + [VECTORS, "/tokenize", "/detokenize"]
NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1)
LITERALS = ("NaN", "-Infinity", "1e999", "1.0", "1E0", "-0", "1" + "0" * 60, "0." + "3" * 400)
"""As they stand in the body; the first three are no JSON, but what Python's own encoder writes."""
TEXTS = (
    "",
    " ",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\u202e\ufeff",
    "🌊水é" * 9,
    "<|im_end|>",
    "{{ 7 * 7 }}",
    "{%",
    "x" * 9000,
)
TREES = ([], {}, [[]], [None], [{}], [0] * 40, [-1], [2**40], ["a", 1], {"a": {"a": []}}, {"5": "x"}, {"-1": 2**70})
SCHEMAS = (
    {},
    True,
    "{",
    {"type": "nope"},
    {"$ref": "#"},
    {"$ref": "#/$defs/none"},
    {"enum": []},
    {"anyOf": []},
    {"type": "string", "pattern": "("},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "string", "maxLength": 2**70},
    {"type": "integer", "minimum": 9, "maximum": 1},
    {"type": "number", "multipleOf": 0},
    {"type": "array", "items": False, "minItems": 1},
    {"type": "object", "properties": {"": {"const": None}}, "required": ["", "other"]},
    {"type": "object", "patternProperties": {"[": {}}, "minProperties": -1},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"const": "\ud800"},
)
REGEXES = (
    "",
    "(",
    "a{9999999}",
    "[^\\x00-\\U0010FFFF]",
    "(?=a)b",
    "(a*)*",
    "\\p{L}",
    "$^",
    "a{3,1}",
    "\\",
    "(|)",
    "[z-a]",
)
GRAMMARS = ("", "root ::= root", "root ::= ", 'start: "a"', "root ::= [", 'root ::= "" | root root', "\0")
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
GRAMMAR_FIELDS = ("structured_outputs", "response_format", *GUIDED)
_NAMES = (
    "model messages prompt input tokens suffix echo best_of stream stream_options n max_tokens "
    "max_completion_tokens min_tokens temperature top_p top_k min_p seed user presence_penalty frequency_penalty "
    "repetition_penalty logit_bias stop stop_token_ids logprobs top_logprobs ignore_eos "
    "include_stop_str_in_output skip_special_tokens bad_words allowed_token_ids prompt_logprobs return_token_ids "
    "truncate_prompt_tokens priority cache_salt deadline_ms service_tier tools tool_choice parallel_tool_calls "
    "functions function_call store metadata add_generation_prompt continue_final_message chat_template "
    "chat_template_kwargs reasoning_effort parse_control_tokens dimensions add_special_tokens encoding_format "
    "pooling no-such-field"
)
FIELDS = _NAMES.split()
_RAW = re.compile(r'"raw:([^"]*)"')
_ENDS = {"stop", "length", "tool_calls"}


@dataclass(frozen=True)
class OddRequest:
    path: str
    data: bytes


def odd_requests(seed: int, model: str) -> Iterator[OddRequest]:
    """Without end; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        path = rng.choice(PATHS)
        body = _plain(rng, path, model)
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
            _spoil(rng, body)
        _keep_cheap(rng, body)
        text = _RAW.sub(r"\1", json.dumps(body, ensure_ascii=rng.random() < 0.5 or _has_surrogate(body)))
        yield OddRequest(path, text.encode())


def _plain(rng: random.Random, path: str, model: str) -> dict[str, Any]:
    words = " ".join(rng.choice(["water", "wheel", "mill", "été", "水车"]) for _ in range(rng.randint(1, 9)))
    if path == VECTORS:
        return {"model": model, "input": words}
    if path == "/tokenize":
        return {"model": model, "prompt": words}
    if path == "/detokenize":
        return {"model": model, "tokens": [rng.randrange(3, 300) for _ in range(4)]}
    body = {"model": model, "max_tokens": rng.randint(1, 6), "stream": rng.random() < 0.3}
    if path == TEXT:
        return body | {"prompt": rng.choice([words, [words, "b"], [5, 6, 7], [[5], [6, 7]]])}
    return body | {"messages": [{"role": "user", "content": rng.choice([words, [{"type": "text", "text": words}]])}]}


def _spoil(rng: random.Random, body: dict[str, Any]) -> None:
    """Sets a field to something odd, or bends or drops what is anywhere in the body."""
    kind = rng.random()
    if kind < 0.2:
        field = rng.choice(GRAMMAR_FIELDS)
        body[field] = _grammar(rng, field)
    elif kind < 0.25:
        body["tools"] = [
            {"type": "function", "function": {"name": rng.choice(["f", "", "a b"]), "parameters": _schema(rng)}}
        ]
        body["tool_choice"] = rng.choice(["required", "auto", "none", {"type": "function", "function": {"name": "f"}}])
    elif kind < 0.75 or not body:
        body[rng.choice(FIELDS)] = _odd(rng)
    else:
        holder, key = rng.choice(list(_places(body)))
        if rng.random() < 0.25:
            del holder[key]
        else:
            holder[key] = _odd(rng)


def _odd(rng: random.Random) -> Any:
    value = rng.choice([NUMBERS, NUMBERS, LITERALS, TEXTS, TREES, (None, True, False, "deep")])
    one = rng.choice(value)
    if value is LITERALS:
        return f"raw:{one}"
    if one == "deep":
        one = []
        for _ in range(rng.choice([20, 70, 400])):
            one = [one]
    return json.loads(json.dumps(one)) if isinstance(one, list | dict) else one  # never one object twice


def _schema(rng: random.Random) -> Any:
    return json.loads(json.dumps(rng.choice(SCHEMAS)))


def _grammar(rng: random.Random, field: str) -> Any:
    choices = rng.choice([[], [""], ["a", "a"], ["\0"], ["x" * 900], ["\ud800"], [1]])
    parts = {"json": _schema(rng), "regex": rng.choice(REGEXES), "choice": choices, "grammar": rng.choice(GRAMMARS)}
    if field == "response_format":
        named = {"name": "n", "schema": parts["json"], "strict": True}
        return rng.choice(
            [{"type": "json_schema", "json_schema": named}, {"type": "json_object"}, {"type": "text"}, {}]
        )
    if field == "structured_outputs":
        return {name: parts[name] for name in rng.sample(sorted(parts), rng.choice([0, 1, 1, 1, 1, 2]))}
    return parts[field.removeprefix("guided_")]


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every key and index of the tree, a few levels deep."""
    level = [node]
    for _ in range(5):
        below = []
        for item in level:
            pairs = list(item.items()) if isinstance(item, dict) else list(enumerate(item[:3]))
            for key, value in pairs:
                yield item, key
                if isinstance(value, dict | list):
                    below.append(value)
        level = below


def _keep_cheap(rng: random.Random, body: dict[str, Any]) -> None:
    """Without a limit an answer is as long as the window: few of those. Nothing here makes a refusal an answer."""
    if ("max_tokens" not in body or body["max_tokens"] is None) and rng.random() < 0.9:
        body["max_tokens"] = 3


def _has_surrogate(node: Any) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in json.dumps(node, ensure_ascii=False))


def check_answer(request: OddRequest, response: httpx.Response) -> None:
    """2xx with an answer that ended by itself, or 4xx with OpenAI's error body; AssertionError otherwise."""
    assert 200 <= response.status_code < 500, response.text[:500]
    if response.status_code >= 400:
        [(name, error)] = _strict(response.content).items()
        assert (name, set(error)) == ("error", {"message", "type", "param", "code"})
        assert isinstance(error["message"], str)
        assert error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        _check_stream(response.content.decode())
    else:
        answer = _strict(response.content)
        assert "error" not in answer
        if request.path in (CHAT, TEXT):
            assert answer["choices"]
            assert {choice["finish_reason"] for choice in answer["choices"]} <= _ENDS


def _check_stream(text: str) -> None:
    events = [event.removeprefix("data: ") for event in re.findall(r"^data: .*$", text, re.MULTILINE)]
    if _strict(events[-1].replace("[DONE]", "{}")).get("error", {}).get("code") == "deadline_exceeded":
        return  # it was to be over within a millisecond or two, and had its status before that
    assert events[-1] == "[DONE]", text[-500:]
    ends: dict[int, Any] = {}
    for chunk in map(_strict, events[:-1]):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"])
    assert ends
    assert set(ends.values()) <= _ENDS


def _strict(data: bytes | str) -> Any:
    def no_constant(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(data, parse_constant=no_constant)
