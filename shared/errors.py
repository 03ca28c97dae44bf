"""The one error tree. A code here is the same string in the HTTP body, the terminal record and the metric label.

HeadraceError
├── InvalidRequest            400
│   ├── ContextLengthExceeded 400
│   └── CursorAhead           400
├── InvalidApiKey             401
├── ModelNotFound             404
├── StreamNotFound            404
├── StreamExpired             410
├── BodyTooLarge              413
├── UnsupportedMediaType      415
├── RequestTimeout            408  its bytes did not arrive in time
├── HeadersTooLarge           431
├── QueueFull                 429  + Retry-After
├── RateLimited               429  + Retry-After; the caller's own limit
├── DeadlineExceeded          408
├── RequestPoisoned           500  the request ended the workers that ran it
├── EngineFailure             500
├── RequestCancelled          499  its client, or another holder of the request, ended it
├── PodDraining               503  + Retry-After; the stream goes on elsewhere
├── Overloaded                503  + Retry-After
└── RedisUnavailable          503  + Retry-After

OpenAI's `type` is `invalid_request_error` for every 4xx but 408 (`timeout_error`) and 429 (`rate_limit_error`, or what
there were too many of), `service_unavailable_error` for 503 and `server_error` for 500.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "ERRORS_BY_CODE",
    "BodyTooLarge",
    "ContextLengthExceeded",
    "CursorAhead",
    "DeadlineExceeded",
    "EngineFailure",
    "HeadersTooLarge",
    "HeadraceError",
    "InvalidApiKey",
    "InvalidRequest",
    "ModelNotFound",
    "Overloaded",
    "PodDraining",
    "QueueFull",
    "RateLimited",
    "RedisUnavailable",
    "RequestCancelled",
    "RequestPoisoned",
    "RequestTimeout",
    "StreamExpired",
    "StreamNotFound",
    "UnsupportedMediaType",
    "Use",
    "error_from_code",
]


class HeadraceError(Exception):
    """Base of every error a client may see.

    `message` is written for the caller, `param` names the offending field ("messages[0].content"),
    `retry_after` is in seconds.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error envelope."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(HeadraceError):
    code = "invalid_value"
    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class CursorAhead(InvalidRequest):
    code = "cursor_ahead"


class InvalidApiKey(InvalidRequest):
    code = "invalid_api_key"
    status = 401


class ModelNotFound(InvalidRequest):
    code = "model_not_found"
    status = 404


class StreamNotFound(InvalidRequest):
    code = "stream_not_found"
    status = 404


class StreamExpired(InvalidRequest):
    code = "stream_expired"
    status = 410


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    status = 413


class UnsupportedMediaType(InvalidRequest):
    code = "unsupported_media_type"
    status = 415


class RequestTimeout(InvalidRequest):
    code = "request_timeout"
    status = 408
    type = "timeout_error"


class HeadersTooLarge(InvalidRequest):
    code = "headers_too_large"
    status = 431


class QueueFull(HeadraceError):
    code = "queue_full"
    status = 429
    type = "rate_limit_error"


@dataclass(frozen=True, slots=True)
class Use:
    """How much of the limits a minute is used; a limit of 0 is none."""

    requests_per_minute: int
    requests: int
    tokens_per_minute: int
    tokens: int


class RateLimited(HeadraceError):
    """`kind` is what there were too many of: OpenAI's `type` of this error, "requests" or "tokens"."""

    code = "rate_limit_exceeded"
    status = 429
    type = "requests"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        kind: str = "requests",
        use: Use | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
        self.kind = kind
        self.use = use

    def body(self) -> dict[str, dict[str, str | None]]:
        envelope = super().body()
        envelope["error"]["type"] = self.kind
        return envelope


class DeadlineExceeded(HeadraceError):
    code = "deadline_exceeded"
    status = 408
    type = "timeout_error"


class RequestPoisoned(HeadraceError):
    code = "request_poisoned"


class EngineFailure(HeadraceError):
    code = "engine_failure"


class RequestCancelled(HeadraceError):
    code = "request_cancelled"
    status = 499
    type = "invalid_request_error"


class PodDraining(HeadraceError):
    code = "resume"
    status = 503
    type = "service_unavailable_error"


class Overloaded(HeadraceError):
    code = "overloaded"
    status = 503
    type = "service_unavailable_error"


class RedisUnavailable(HeadraceError):
    code = "redis_unavailable"
    status = 503
    type = "service_unavailable_error"


def _tree(cls: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _tree(child))]


ERRORS_BY_CODE: dict[str, type[HeadraceError]] = {cls.code: cls for cls in _tree(HeadraceError)}


def error_from_code(code: str, message: str) -> HeadraceError:
    """The error a terminal record names; an unknown code (a newer worker) becomes the base error."""
    return ERRORS_BY_CODE.get(code, HeadraceError)(message)
