"""Tools in a prompt and in an answer: how they are shown to the model, and how its calls are recognised or enforced.

In: an `Offer` and the model's chat template. Out: messages for the template, the grammar that enforces a call, and the
`Reading` that any pod needs to find the calls in the text.

A template without tools gets a generic section in the system turn, in the Hermes format; calls and results in the
history are written in the same format (results as user turns), so nothing of them is lost.
"""

from __future__ import annotations

import json
import re
from typing import Any

from api_service.prepare.grammar import check_grammar, json_schema_spec
from api_service.prepare.model import ServedModel
from api_service.reading.reader import MARKERS
from api_service.schemas.tools import Offer
from shared.messages import Reading
from shared.params import GrammarSpec

__all__ = [
    "answer_reading",
    "call_grammar",
    "has_tools_branch",
    "needs_special_tokens",
    "tool_parser",
]

MAX_CALLS = 16
"""Of one enforced answer: a small model would go on for ever."""

_TOOLS = re.compile(r"\btools\b")
_RESULT = re.compile(r"tool_call_id|['\"]tool['\"]")

_SECTION = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments object>}}
</tool_call>"""


def has_tools_branch(model: ServedModel) -> bool:
    """Whether the template itself shows the functions on offer."""
    return _TOOLS.search(model.template) is not None


def tool_parser(model: ServedModel) -> str:
    """The format in which the model writes calls: the pod's setting, else by what its template says."""
    template = model.template
    if model.tool_parser != "auto":
        return model.tool_parser
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template or not has_tools_branch(model):
        return "hermes"
    if "func_name1(" in template:
        return "pythonic"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters"' in template else "json"


def answer_reading(offer: Offer, model: ServedModel, prompt: str) -> Reading | None:
    """None when the text is the content. `prompt`: as rendered, since it may have begun the reasoning."""
    think = ""
    if "<think>" in model.template or "</think>" in model.template:
        think = "open" if prompt.rstrip().endswith("<think>") else "maybe"
    enforced = offer.choice in ("required", "named")
    if not offer.functions:
        return Reading(think=think) if think else None
    return Reading(
        parser=tool_parser(model),
        names=tuple(function.name for function in offer.functions),
        forced=offer.choice == "required",
        named=offer.named,
        think="" if enforced else think,
    )


def needs_special_tokens(reading: Reading | None, model: ServedModel) -> bool:
    """Whether the format's marker is a special token, which would otherwise be left out of the text."""
    marker = "" if reading is None else MARKERS.get(reading.parser, "<tool_call>")
    return bool(marker) and model.vocabulary.is_special(marker)


def call_grammar(offer: Offer, model: ServedModel) -> GrammarSpec | None:
    """Enforces a call where one is required: of a named function its arguments, else a JSON list of calls.

    Raises InvalidRequest when a function's parameters cannot be enforced.
    """
    if offer.choice not in ("required", "named"):
        return None
    chosen = [i for i, function in enumerate(offer.functions) if offer.named in ("", function.name)]
    for i in chosen:
        param = f"tools[{i}].function.parameters"
        alone = json_schema_spec(offer.functions[i].parameters, param)
        check_grammar(alone, param, model)
        if offer.named:
            return alone
    calls = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CALLS if offer.parallel else 1,
        "items": {"anyOf": [_call_schema(offer, i) for i in chosen]},
    }
    spec = json_schema_spec(calls, "tools")
    check_grammar(spec, "tools", model)
    return spec


def _call_schema(offer: Offer, i: int) -> dict[str, Any]:
    function = offer.functions[i]
    place = f"#/items/anyOf/{i}/properties/arguments"
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": _moved(function.parameters, place)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """The schema with its own references pointing to where it now stands."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: value if key in ("enum", "const") else _moved(value, place) for key, value in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#") and ref[1:2] in ("", "/"):
        moved["$ref"] = place + ref[1:]
    return moved


def fitted(messages: list[dict[str, Any]], offer: Offer, model: ServedModel) -> list[dict[str, Any]]:
    """The messages as this template can show them: what it has no branch for becomes text, in the Hermes format."""
    shows_calls = "tool_calls" in model.template
    shows_results = _RESULT.search(model.template) is not None
    plain = [_plain(message, calls=not shows_calls, results=not shows_results) for message in messages]
    if not offer.functions or has_tools_branch(model):
        return plain
    tools = "\n".join(json.dumps(function.definition, ensure_ascii=False) for function in offer.functions)
    section = _SECTION.format(tools=tools)
    if plain[0]["role"] == "system":
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{section}"}, *plain[1:]]
    return [{"role": "system", "content": section}, *plain]


def _plain(message: dict[str, Any], *, calls: bool, results: bool) -> dict[str, Any]:
    if message["role"] == "tool" and results:
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    made = message.get("tool_calls", ())
    if not made or not calls:
        return message
    texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in made]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return kept | {"content": "\n".join([*([message["content"]] if message["content"] else []), *texts])}
