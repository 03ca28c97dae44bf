"""Body of POST /v1/completions.

In: the JSON object. Out: a list of prompts, each a text or token ids, in the order of their choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, WithJsonSchema

from api_service.schemas.common import MAX_CHOICES, GenerationBody
from api_service.schemas.values import WHOLE
from shared.errors import InvalidRequest

__all__ = ["PROMPT_SCHEMA", "CompletionRequest", "Prompt", "prompt_list"]

MAX_LOGPROBS = 5
"""OpenAI's limit of the text endpoint."""

Prompt = str | list[int]

_FORMS = "a string, a list of strings, a list of token ids or a list of such lists"
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


def prompt_list(value: object, most: int = MAX_CHOICES) -> list[Prompt]:
    """Every accepted form as a list of prompts. By hand: pydantic would list an error for each of a million tokens."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"must be {_FORMS}")
    if not value:
        raise ValueError("must not be empty")
    if all(type(item) is int for item in value):
        return [value]
    if len(value) > most:
        raise ValueError(f"at most {most} texts are allowed")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
        return value
    raise ValueError(f"must be {_FORMS}")


class CompletionRequest(GenerationBody):
    prompt: Annotated[list[Prompt], PlainValidator(prompt_list), WithJsonSchema(PROMPT_SCHEMA)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    """Log-probabilities of the drawn tokens and of this many best ones."""
    add_special_tokens: bool | None = None
    """False leaves out the BOS token of models that want one."""
    best_of: Annotated[int, Field(ge=1), WHOLE] | None = None
    max_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    """0 only to score the prompt."""
    suffix: Annotated[str, Field(max_length=1 << 20)] | None = None
    """Text after the answer, for models with fill-in-the-middle tokens."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{key: ok for key, ok in GenerationBody.UNSUPPORTED.items() if key != "best_of"},
    }

    def check(self) -> None:
        """Rules that span fields. Raises InvalidRequest."""
        self.check_stream_options()
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise InvalidRequest("'best_of' is only supported when it equals 'n'.", param="best_of")
        if len(self.prompt) * n > MAX_CHOICES:
            raise InvalidRequest(f"Prompts times 'n' must be at most {MAX_CHOICES}.", param="n")
        if self.max_tokens == 0 and self.scored_alternatives is None:
            raise InvalidRequest(
                "'max_tokens' must be 1 or more, unless 'echo' with 'logprobs' scores the prompt.", param="max_tokens"
            )
        if self.echo and self.suffix:
            raise InvalidRequest("'echo' and 'suffix' cannot be combined.", param="echo")

    @property
    def quick(self) -> bool:
        texts = (self.echo, self.suffix, self.bad_words, self.response_format, self.structured_outputs)
        guides = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        return all(isinstance(prompt, list) for prompt in self.prompt) and not any((*texts, *guides))

    @property
    def scored_alternatives(self) -> int | None:
        """How many alternatives are wanted for each prompt token; None: no log-probabilities of the prompt."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)
