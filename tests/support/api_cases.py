"""The steps that reported cases are made of: whole and streamed answers of a real stack, forced tokens, metrics.

In: a pod's URL and fields of a body. Out: JSON, chunks, texts by choice. Raises AssertionError with the answer's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Streamed", "body_of", "force", "metric", "post", "refused", "stream", "whole"]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODEL = "SmolLM2-135M-Instruct"
TIMEOUT_S = 60.0


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """A greedy body of few tokens; `text` is the prompt or the user's message."""
    text = fields.pop("text", "Hi")
    shape: dict[str, Any] = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    return {"model": MODEL, "max_tokens": 4, "temperature": 0, **shape, **fields}


def force(*token_ids: int) -> dict[str, Any]:
    """Nothing but these tokens can win."""
    return {"logit_bias": {str(token_id): 100 for token_id in token_ids}}


def post(url: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> httpx.Response:
    if raw is not None:
        headers = {"content-type": "application/json", **headers}
        return httpx.post(url + path, content=raw, headers=headers, timeout=TIMEOUT_S)
    return httpx.post(url + path, json=body, headers=headers, timeout=TIMEOUT_S)


def whole(url: str, path: str, **fields: Any) -> dict[str, Any]:
    response = post(url, path, body_of(path, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = json.loads(response.content, parse_constant=_no_constant)
    return answer


def refused(response: httpx.Response, param: str | None, status: int = 400) -> None:
    """An OpenAI error body of this status that names the field, short and without anything of our insides."""
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert len(response.content) < 16_384
    for leak in ("input_value", "errors.pydantic.dev", "Traceback", "detail"):
        assert leak not in response.text


@dataclass
class Streamed:
    """One stream, taken apart."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    raw: str = ""
    done: bool = False

    def choices(self, index: int | None = None) -> list[dict[str, Any]]:
        return [c for chunk in self.chunks for c in chunk["choices"] if index is None or c["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(content_of(choice) or "" for choice in self.choices(index))

    def finish(self, index: int = 0) -> str | None:
        [reason] = [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]
        return str(reason)

    @property
    def usage(self) -> Any:
        return self.chunks[-1].get("usage")


def content_of(choice: dict[str, Any]) -> str | None:
    content: str | None = choice["text"] if "text" in choice else choice["delta"].get("content")
    return content


def stream(url: str, path: str, **fields: Any) -> Streamed:
    """Reads the events with `str.splitlines`, as careless clients do."""
    response = post(url, path, body_of(path, **{"stream": True, **fields}))
    assert response.status_code == 200, response.text
    result = Streamed(raw=response.content.decode())
    for line in result.raw.splitlines():
        if line == "data: [DONE]":
            result.done = True
        elif line.startswith("data: "):
            assert not result.done, "nothing comes after [DONE]"
            result.chunks.append(json.loads(line[6:], parse_constant=_no_constant))
    return result


def metric(urls: Iterable[str], name: str, **labels: str) -> float:
    """Sum of a sample over pods and its other labels."""
    total = 0.0
    for url in urls:
        text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
    return total


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")
