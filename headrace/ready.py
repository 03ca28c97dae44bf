"""What a person does with a service that is ready: words the URL and a curl line that works.

In: address and keys of the pod, the model's name. Out: headers, and the text that `serve` prints.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping

__all__ = ["authorization", "base_url", "reachable_host", "ready_text"]

DEFAULT_URL = "http://127.0.0.1:8000"
PROMPT = "Write a short haiku about Python programming."
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


def reachable_host(host: str) -> str:
    """The host to call when a program listens on `host`: one of this machine for "every address"; IPv6 in brackets."""
    host = _EVERY_ADDRESS.get(host, host)
    return f"[{host}]" if ":" in host else host


def base_url(host: str, port: int) -> str:
    return f"http://{reachable_host(host)}:{port}"


def _key(settings: Mapping[str, str]) -> str:
    """One key that the pod accepts, "" when it asks for none. Raises OSError when the key file cannot be read."""
    keys = [key for key in settings.get("HEADRACE_API_KEY", "").split(",") if key.strip()]
    if not keys and settings.get("HEADRACE_API_KEY_FILE"):
        with open(settings["HEADRACE_API_KEY_FILE"], encoding="utf-8") as file:
            keys = [line for line in file if line.strip()]
    return keys[0].strip() if keys else ""


def _command() -> str:
    """How this program was called, so that what we print can be called the same way."""
    return shlex.quote(sys.argv[0]) if os.path.basename(sys.argv[0]) == "headrace" else "headrace"


def authorization(settings: Mapping[str, str]) -> dict[str, str]:
    """Headers that the pod accepts. Raises OSError when the key file cannot be read."""
    key = _key(settings)
    return {"Authorization": f"Bearer {key}"} if key else {}


def ready_text(url: str, model: str, settings: Mapping[str, str], redis_url: str | None) -> str:
    """What to do with a service that is ready. The curl line can be pasted into a shell as it is.

    `redis_url` None: the embedded one, which `headrace status` finds by itself.
    """
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "stream": True}
    lines = [f"curl -N {shlex.quote(url + '/v1/chat/completions')}", "  -H 'Content-Type: application/json'"]
    key = _key(settings)
    if key:
        lines.append(f"  -H {shlex.quote(f'Authorization: Bearer {key}')}")
    lines.append(f"  -d {shlex.quote(json.dumps(body))}")
    curl = " \\\n".join(lines)
    chat = "" if url == DEFAULT_URL else f" --base-url {url}/v1"
    status = f" --redis-url {shlex.quote(redis_url)}" if redis_url else ""
    return (
        f"\nHeadrace is ready.  Base URL: {url}/v1   Model: {model}   (Ctrl-C stops it)\n\n{curl}\n\n"
        f"In another terminal:  {_command()} chat{chat}\n"
        f"                      {_command()} status{status}\n"
    )
