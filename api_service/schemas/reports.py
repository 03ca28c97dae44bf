"""What the other routes answer, and every error, as types for the OpenAPI document: exactly the keys that are sent."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

__all__ = [
    "Detokenized",
    "EmbeddingList",
    "ErrorBody",
    "LoadReport",
    "ModelEntry",
    "ModelList",
    "Readiness",
    "Status",
    "StreamError",
    "Tokenized",
    "TokenizerInfo",
    "Version",
]

_EXACT = ConfigDict(extra="forbid")


@with_config(_EXACT)
class ErrorDetails(TypedDict):
    message: str
    type: Literal[
        "invalid_request_error",
        "rate_limit_error",
        "requests",
        "tokens",
        "timeout_error",
        "server_error",
        "service_unavailable_error",
    ]
    param: str | None
    code: str


@with_config(_EXACT)
class ErrorBody(TypedDict):
    """Every refusal and failure, on every route."""

    error: ErrorDetails


@with_config(_EXACT)
class StreamErrorDetails(ErrorDetails):
    request_id: str


@with_config(_EXACT)
class StreamError(TypedDict):
    """The last event of a stream that failed; no `[DONE]` follows."""

    error: StreamErrorDetails


@with_config(_EXACT)
class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@with_config(_EXACT)
class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@with_config(_EXACT)
class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@with_config(_EXACT)
class ModelEntry(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["headrace"]
    root: str
    parent: None
    max_model_len: int
    generation_defaults: dict[str, float]


@with_config(_EXACT)
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelEntry]


@with_config(_EXACT)
class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@with_config(ConfigDict(extra="allow"))
class TokenizerInfo(TypedDict):
    """Beside these, the special tokens by their names: `bos_token`, `eos_token`, …"""

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None


@with_config(_EXACT)
class Detokenized(TypedDict):
    prompt: str


@with_config(_EXACT)
class LoadReport(TypedDict):
    server_load: int


@with_config(_EXACT)
class Status(TypedDict):
    status: Literal["ok"]


@with_config(_EXACT)
class Version(TypedDict):
    version: str


@with_config(_EXACT)
class WorkerReport(TypedDict):
    id: str
    model: str
    state: str
    last_step_age_ms: int


@with_config(_EXACT)
class Readiness(TypedDict):
    status: Literal["ready", "not ready"]
    reason: str | None
    workers: list[WorkerReport]
