"""A small client for any OpenAI-compatible server: streams one answer as text, and goes on where a connection broke.

In: messages. Out: pieces of text as they arrive. Reads event streams as the standard says (lines end on LF or CR LF
only: U+2028 is text). Where events carry ids, as Headrace's do, a lost connection resumes at /streams/{id}.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from shared.errors import PodDraining, RedisUnavailable

__all__ = ["ChatClient", "ChatError", "Event", "ListedModel", "Unreachable", "read_events"]

FIRST_BACKOFF_S = 0.25
MAX_RECONNECTS = 8
"""In a row without a new event; about 20 s in all."""
Stream = AbstractContextManager[httpx.Response]
KEEP_RUNNING_S = "3"
_AWAY = {httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE}
_RESUMABLE = {PodDraining.code, RedisUnavailable.code}
_TIMEOUT = httpx.Timeout(connect=10, read=120, write=30, pool=10)


class ChatError(Exception):
    """The server refused or broke off; the message is for the person at the terminal."""


class Unreachable(ChatError):
    """Nobody answers at that address."""


@dataclass(frozen=True)
class ListedModel:
    """One model of the server. `defaults` hold where a request is silent; None: the server does not tell them."""

    id: str
    defaults: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Event:
    """One server-sent event. `id` is "" when it has none."""

    data: str
    id: str = ""
    name: str = "message"


def read_events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """Events of a byte stream; comments are dropped, and so is an event that was cut off in the middle."""
    buffer = b""
    fields: dict[str, list[str]] = {}
    for chunk in chunks:
        buffer += chunk
        *lines, buffer = buffer.replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line:
                name, _, value = line.decode("utf-8", "replace").partition(":")
                fields.setdefault(name, []).append(value.removeprefix(" "))
                continue
            if "data" in fields:
                yield Event("\n".join(fields["data"]), fields.get("id", [""])[-1], fields.get("event", ["message"])[-1])
            fields = {}


class ChatClient:
    """Talks to `base_url` (".../v1"). A context manager: leaving it closes the connection."""

    def __init__(self, base_url: str, api_key: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._base_url = base_url
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def models(self) -> list[ListedModel]:
        """The models that the server has. Raises Unreachable, or ChatError where it answers something else."""
        try:
            response = self._http.get(f"{self._base_url}/models")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(
                f"{self._base_url} cannot be reached: {str(error).rstrip('.')}. `headrace serve` starts a server here, "
                f"--base-url names another one{self._hint()}"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise ChatError(self._refusal(response))
        try:
            return [ListedModel(str(m["id"]), m.get("generation_defaults")) for m in response.json()["data"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ChatError(f"what {self._base_url}/models answers is no list of models{self._hint()}") from error

    def answer(
        self, model: str, messages: list[dict[str, str]], sampling: Mapping[str, float] | None = None
    ) -> Generator[str, None, None]:
        """Pieces of the answer. Closing the iterator ends the generation. Raises ChatError; what was yielded stands.

        `sampling`: fields of the request besides, such as temperature.
        """
        body = {"model": model, "messages": messages, "stream": True, **(sampling or {})}
        reply = _Reply()
        reconnects = 0
        # Asking again attaches to the same answer, and the server does not drop it before we are back.
        once = {"Idempotency-Key": uuid.uuid4().hex, "X-Headrace-Keep-Running": KEEP_RUNNING_S}
        while not reply.complete:
            seen = reply.last_id
            try:
                with self._open(body, seen, once) as response:
                    if response.status_code != httpx.codes.OK:
                        response.read()
                        trouble = self._refusal(response)
                        if not seen or response.status_code not in _AWAY:
                            raise ChatError(trouble)
                    else:
                        trouble = "the server ended the stream too early"
                        for event in read_events(response.iter_bytes()):
                            yield from reply.take(event)
            except _Interrupted as error:
                trouble = str(error)
            except httpx.TransportError as error:
                trouble = str(error) or type(error).__name__
            if reply.complete:
                return
            reconnects = 1 if reply.last_id != seen else reconnects + 1
            if reconnects > MAX_RECONNECTS or (reply.began and not reply.last_id):
                raise ChatError(f"the connection to {self._base_url} was lost: {trouble}")
            time.sleep(FIRST_BACKOFF_S * 2 ** min(reconnects - 1, 4))

    def _open(self, body: Mapping[str, object], last_id: str, once: dict[str, str]) -> Stream:
        """The first request, or after an event `last_id` the rest of that stream."""
        if last_id:
            stream = last_id.partition(":")[0]
            return self._http.stream("GET", f"{self._base_url}/streams/{stream}", headers={"Last-Event-ID": last_id})
        return self._http.stream("POST", f"{self._base_url}/chat/completions", json=body, headers=once)

    def _refusal(self, response: httpx.Response) -> str:
        """The server's own words, where it has any."""
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:300] or response.reason_phrase
        hint = self._hint() if response.status_code == httpx.codes.NOT_FOUND else ""
        return f"the server answered {response.status_code}: {message}{hint}"

    def _hint(self) -> str:
        """What is wrong with the address, if that is how it looks."""
        if not self._base_url.startswith(("http://", "https://")):
            return f". It must begin with http:// or https://: --base-url http://{self._base_url}"
        return "" if "/v1" in self._base_url else f". Most base URLs end in /v1: --base-url {self._base_url}/v1"


class _Interrupted(Exception):
    """The server ends the connection and says that the stream goes on elsewhere."""


class _Reply:
    """What is known of the answer so far."""

    def __init__(self) -> None:
        self.last_id = ""
        self.began = False
        self.complete = False

    def take(self, event: Event) -> Iterator[str]:
        """The text of one event. Raises ChatError or _Interrupted when it is an error event."""
        self.last_id = event.id or self.last_id
        if event.data == "[DONE]":
            self.complete = True
            return
        try:
            chunk = json.loads(event.data)
        except ValueError as error:
            raise ChatError(f"the server sent something that is not JSON: {event.data[:200]}") from error
        if fault := chunk.get("error"):
            kind = _Interrupted if fault.get("code") in _RESUMABLE and self.last_id else ChatError
            raise kind(str(fault.get("message", fault)))
        for choice in chunk.get("choices", []):
            # Some servers close the connection after the finish reason, without [DONE].
            self.complete = self.complete or choice.get("finish_reason") is not None
            text = choice.get("delta", {}).get("content")
            if text:
                self.began = True
                yield text
