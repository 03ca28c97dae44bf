"""Limits of one share of the service, and the refusal when one is reached.

In: what the operator allows and what Redis has counted. Out: `Use` for headers, or RateLimited in OpenAI's words.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import RateLimited, Use
from shared.messages import GenerateRequest

__all__ = ["NO_LIMITS", "Limits", "rate_limited", "use_of"]


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


def use_of(limits: Limits, requests: int, tokens: int) -> Use:
    return Use(limits.requests_per_minute, requests, limits.tokens_per_minute, tokens)


def rate_limited(request: GenerateRequest, limits: Limits, which: int, wait_ms: int, use: Use) -> RateLimited:
    """In the words that clients of OpenAI know."""
    needed = request.prompt_tokens + request.max_output_tokens
    what = _LIMIT_TEXTS[which].format(limits=limits, use=use, needed=f"up to {needed}")
    seconds = wait_ms / 1000
    message = f"Rate limit reached for {request.model} on {what} Please try again in {seconds:.3g}s."
    return RateLimited(message, kind=_LIMIT_KINDS[which], use=use, retry_after=seconds)
