"""Body of POST /v1/embeddings.

In: the JSON object. Out: a list of inputs, each a text or token ids, in the order of their vectors.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from api_service.schemas.common import QueuedBody
from api_service.schemas.completion import PROMPT_SCHEMA, Prompt, prompt_list
from api_service.schemas.values import WHOLE

__all__ = ["EmbeddingRequest"]

MAX_INPUTS = 1024


class EmbeddingRequest(QueuedBody):
    input: Annotated[list[Prompt], PlainValidator(partial(prompt_list, most=MAX_INPUTS)), WithJsonSchema(PROMPT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    """The model's own number only: its vectors were not trained to be cut."""
    pooling: Literal["last", "mean"] | None = None
    """Of the hidden states; "last" is the default. Ours, not OpenAI's."""
    add_special_tokens: bool | None = None
