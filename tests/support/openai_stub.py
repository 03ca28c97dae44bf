"""A tiny OpenAI-compatible server with scripted faults, to try clients against.

In: the words of the answer and where each connection breaks. Out: a base URL, and the requests that came in. With
`ids=False` it is any server that knows nothing of resuming.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

__all__ = ["OpenAIStub"]


class OpenAIStub:
    """`cuts`: after how many events the first, second, … connection breaks; later ones are whole."""

    def __init__(
        self, words: list[str], *, cuts: list[int] | None = None, ids: bool = True, done: bool = True, status: int = 200
    ) -> None:
        self.words = words
        self.cuts = list(cuts or [])
        self.ids = ids
        self.done = done
        self.status = status
        self.farewell: dict[str, str] | None = None
        """The error that a connection ends with instead of breaking in the middle of an event."""
        self.model: dict[str, Any] = {"id": "stub-model"}
        """Its entry in the list of models."""
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.hold = threading.Event()
        """Set: a stream stops before its last word until the client has gone."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold.clear()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def events(self) -> list[bytes]:
        """The whole stream, one event a word, then the finish reason and perhaps [DONE]."""
        choices: list[dict[str, Any]] = [{"index": 0, "delta": {"content": word}} for word in self.words]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        events = []
        for seq, choice in enumerate(choices):
            head = f"id: r1:{seq}\n" if self.ids else ""
            events.append(
                f": a comment\n\n{head}data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()
            )
        return [*events, b"data: [DONE]\n\n"] if self.done else events


def _handler(stub: OpenAIStub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            stub.requests.append(("GET", self.path, dict(self.headers), None))
            if self.path == "/v1/models":
                self._json(200, {"object": "list", "data": [stub.model]})
            elif self.path != "/v1/streams/r1":
                self._json(404, {"error": {"message": "no such path", "type": "x", "param": None, "code": None}})
            else:
                self._stream(int(self.headers["Last-Event-ID"].rpartition(":")[2]) + 1)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.requests.append(("POST", self.path, dict(self.headers), body))
            if stub.status != 200:
                self._json(
                    stub.status, {"error": {"message": "no such thing", "type": "x", "param": None, "code": None}}
                )
            else:
                self._stream(0)

        def _json(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, first: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            events = stub.events()
            cut = stub.cuts.pop(0) if stub.cuts else len(events)
            for number, event in enumerate(events[first:]):
                if number == cut:
                    last = f"data: {json.dumps({'error': stub.farewell})}\n\n".encode() if stub.farewell else b""
                    self.wfile.write(last or event[: len(event) // 2])  # in the middle of an event
                    break
                self.wfile.write(event)
                self.wfile.flush()
                if stub.hold.is_set() and first + number == len(stub.words) - 2:
                    self.connection.settimeout(30)
                    self.connection.recv(1)  # returns when the client has gone
                    stub.requests.append(("GONE", self.path, {}, None))
                    break
            self.close_connection = True

    return Handler
