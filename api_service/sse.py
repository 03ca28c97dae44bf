"""Server-sent events: framing, and JSON that survives clients which split lines on more than LF.

In: objects and byte strings. Out: bytes of events. The format: https://html.spec.whatwg.org/multipage/server-sent-
events.html
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["DONE", "HEADERS", "KEEP_ALIVE", "error_event", "event", "json_bytes"]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: no data, no id, so it changes neither what a client parses nor where it would resume."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.Encoder().encode
_LINE_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8. msgspec escapes C0 controls; U+2028, U+2029 and U+0085 are escaped here, because `str.splitlines`
    and some clients end a line at them. They occur in strings only, so replacing their bytes is safe."""
    data = _encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


def event(data: bytes, event_id: str) -> bytes:
    return b"id: %b\ndata: %b\n\n" % (event_id.encode(), data)


def error_event(body: dict[str, dict[str, str | None]], rid: str) -> bytes:
    """An error after the first byte. No id of its own: a client that resumes does so after the last real event."""
    return b"data: %b\n\n" % json_bytes({"error": {**body["error"], "request_id": rid}})
