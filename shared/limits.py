"""Limits of one share of the service, and the refusal when one is reached.

In: what the operator allows and what Redis has counted. Out: `Use` for headers, or RateLimited in OpenAI's words.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from shared.errors import RateLimited, Use
from shared.messages import GenerateRequest

__all__ = ["ANY", "NO_LIMITS", "Limits", "Terms", "key_id", "rate_limited", "use_of"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one share may do, over all models; 0 = no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_open: int = 0
    """Requests that wait or run."""


NO_LIMITS = Limits()


_LIMIT_KINDS = {1: "requests", 2: "tokens", 3: "requests"}
_LIMIT_TEXTS = {
    1: "requests per minute (RPM): Limit {limits.requests_per_minute}, Used {use.requests}, Requested 1.",
    2: "tokens per minute (TPM): Limit {limits.tokens_per_minute}, Used {use.tokens}, Requested {needed}.",
    3: "requests at the same time: Limit {limits.max_open}.",
}


@dataclass(frozen=True, slots=True)
class Terms:
    """On which a request is queued, beside what it says itself."""

    limits: Limits = NO_LIMITS
    """Of its share."""
    prefer: str = ""
    """The worker it is offered to first."""


ANY = Terms()


def key_id(key: str) -> str:
    """What an API key is called in Redis, files and tables: a hash, which tells nothing of the key."""
    return "key-" + hashlib.sha256(b"tenant:" + key.encode()).hexdigest()[:16]


def use_of(limits: Limits, requests: int, tokens: int) -> Use:
    return Use(limits.requests_per_minute, requests, limits.tokens_per_minute, tokens)


def rate_limited(request: GenerateRequest, limits: Limits, which: int, wait_ms: int, use: Use) -> RateLimited:
    """In the words that clients of OpenAI know."""
    needed = request.prompt_tokens + request.max_output_tokens
    what = _LIMIT_TEXTS[which].format(limits=limits, use=use, needed=f"up to {needed}")
    seconds = wait_ms / 1000
    message = f"Rate limit reached for {request.model} on {what} Please try again in {seconds:.3g}s."
    return RateLimited(message, kind=_LIMIT_KINDS[which], use=use, retry_after=seconds)
