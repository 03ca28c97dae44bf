"""OpenAI's x-ratelimit-* headers, from what Redis has counted."""

from __future__ import annotations

from shared.errors import Use

__all__ = ["RATE_HEADERS", "rate_headers"]

_FACTS = ("limit", "remaining", "reset")
RATE_HEADERS = [f"x-ratelimit-{fact}-{kind}" for fact in _FACTS for kind in ("requests", "tokens")]


def rate_headers(use: Use | None) -> dict[str, str]:
    """Of the limits that there are: the limit, what is left, and when nothing of it will be used any more."""
    if use is None:
        return {}
    headers = {}
    kinds = (("requests", use.requests_per_minute, use.requests), ("tokens", use.tokens_per_minute, use.tokens))
    for kind, limit, used in kinds:
        if limit:
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, limit - used))
            headers[f"x-ratelimit-reset-{kind}"] = _duration(60.0 * used / limit)
    return headers


def _duration(seconds: float) -> str:
    """120 -> "2m0s", 1.5 -> "1.5s", 0.02 -> "20ms", as OpenAI writes it."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    spelled = f"{rest:.2f}".rstrip("0").rstrip(".") + "s"
    return f"{int(minutes)}m{spelled}" if minutes else spelled
