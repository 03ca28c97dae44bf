"""What chat and text completions share: sampling and stream fields, ranges, the rule for fields we do not honour.

In: a JSON object. Out: a validated model, or InvalidRequest with the field's path and one short reason. Unknown keys
are ignored; a known key that we do not honour is refused when its value would change the answer: nothing is dropped
silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, PrivateAttr, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from api_service.schemas.values import WHOLE, AllowedIds, Bias, Format, JsonSchema, Stops, TokenIds, Words
from shared.errors import InvalidRequest

__all__ = ["MAX_CHOICES", "Body", "GenerationBody", "QueuedBody", "StreamOptions", "parse"]

MAX_N = 128
MAX_CHOICES = 512
"""Prompts times n of one request."""
MAX_PROMPT_LOGPROBS = 20
MAX_PRIORITY = 100
_COUNTED = re.compile(r"^\w+ should have (.+?)(?: after validation, not \d+)?$")
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_IGNORED = 32
_MESSAGE_LENGTH = 300
_INT64 = 2**63

BodyT = TypeVar("BodyT", bound="Body")


class Body(BaseModel):
    """Strict types (no "1" for 1, no true for 1), unknown keys ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """For the OpenAPI document: also what is accepted of the fields that are not honoured."""
        schema = handler.resolve_ref_schema(handler(core))
        for key, harmless in cls.UNSUPPORTED.items():
            values = [ok for i, ok in enumerate(harmless) if not any(ok == other for other in harmless[:i])]
            schema["properties"][key] = {"enum": [None, *values], "description": "Other values are not supported."}
        return schema

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known keys we do not honour -> the values that change nothing and so are accepted, as null always is."""

    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys the client sent that nothing here reads, for the header `x-ignored-params`."""
        return self._ignored


def parse(model: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    """Raises InvalidRequest naming the first bad field; never quotes what the client sent."""
    for key, harmless in model.UNSUPPORTED.items():
        value = body.get(key)
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in harmless):
            allowed = f" Accepted are: {', '.join(map(_spelled, harmless))}." if harmless else ""
            raise InvalidRequest(f"'{key}' is not supported here with this value.{allowed}", param=key)
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        raise _first_error(error) from None
    known = model.model_fields.keys() | model.UNSUPPORTED.keys()
    parsed._ignored = tuple(
        sorted(key for key, value in body.items() if value is not None and key not in known and _PLAIN.fullmatch(key))
    )[:_MAX_IGNORED]
    return parsed


def _spelled(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)


def _first_error(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    more = f" ({error.error_count() - 1} more problems)" if error.error_count() > 1 else ""
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{path}'.{more}", param=path)
    reason = _reason(first["type"], first["msg"])
    return InvalidRequest(f"Invalid value for '{path}': {reason[:_MESSAGE_LENGTH]}.{more}", param=path)


def _reason(kind: str, message: str) -> str:
    """Pydantic's words as a caller's: JSON has objects and lists, neither dictionaries nor instances."""
    if kind in ("dict_type", "model_type"):
        return "must be an object"
    if kind == "list_type":
        return "must be a list"
    plain = message.removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return _COUNTED.sub(r"must have \1", plain)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class QueuedBody(Body):
    """Fields of everything that is queued for a worker."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=_INT64), WHOLE] | None = None
    """Keeps this many tokens of the prompt's end; -1 as many as fit beside the answer."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), WHOLE] | None = None
    """Lower is served first."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Cached prefixes are shared between requests of the same salt only."""
    deadline_ms: Annotated[int, Field(ge=1, lt=2**40), WHOLE] | None = None
    """Milliseconds from now; a request that has not been started by then is dropped. Ours, not OpenAI's."""

    user: str | None = None
    """Where no API keys are in use: whose fair share and limits it counts for."""
    service_tier: Literal["auto", "default", "flex"] | None = None
    """"flex": batch work, which runs when nothing else wants to."""

    @property
    def klass(self) -> str:
        """The queue it goes to."""
        return "batch" if self.service_tier == "flex" else "interactive"

    @property
    def tier(self) -> str:
        """What the answer says of it, as OpenAI does when it was asked; "" = nothing."""
        return {None: "", "flex": "flex"}.get(self.service_tier, "default")

    @property
    def quick(self) -> bool:
        """Whether a small body of this kind needs neither tokenizer nor template nor grammar: a thread costs more."""
        return False

    def check_truncation(self) -> None:
        """Raises InvalidRequest."""
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("'truncate_prompt_tokens' must be -1, or 1 or more.", param="truncate_prompt_tokens")


class GenerationBody(QueuedBody):
    """Fields that chat and text completions read the same way."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64), WHOLE] | None = None
    """-1 and 0 are off."""
    min_p: _Share | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64), WHOLE] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=10, allow_inf_nan=False)] | None = None
    logit_bias: Bias = {}
    stop: Stops = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Words = ()
    allowed_token_ids: AllowedIds = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOGPROBS), WHOLE] | None = None
    """Adds log-probabilities of the prompt's tokens to the answer. Not for streams."""
    return_token_ids: bool | None = None
    response_format: Format = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's way to say it: one of json, regex, choice, grammar, json_object. Read by prepare/grammar.py."""
    guided_json: JsonSchema = None
    """vLLM's older names for the same."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "early_stopping": (False,),
        "prompt_embeds": (),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "logits_processors": ([],),
        "kv_transfer_params": (),
        "guided_whitespace_pattern": (),
        "structural_tag": (),
    }

    def check_stream_options(self) -> None:
        """OpenAI's rule: options of a stream only with a stream. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("'prompt_logprobs' is not available in streams.", param="prompt_logprobs")
        self.check_truncation()

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)
