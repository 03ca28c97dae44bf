"""Renders chat templates that clients send, in a process of its own: whatever such a template does ends with it.

In (stdin) and out (stdout): msgpack after four bytes of length. SIGALRM, at its default, ends the process in the middle
of any expression; a limit on its memory ends it before the pod notices. One child a pod, started at first need.
"""

from __future__ import annotations

import atexit
import resource
import signal
import subprocess
import sys
import threading
from typing import Any, BinaryIO

import msgspec
from jinja2 import TemplateError

from api_service.prepare.renderer import render_jinja_template, template_literal_text

__all__ = ["TemplateFailed", "TemplateTooLong", "literal_text", "render"]

_MEMORY = 1 << 30
_LENGTH = 4
_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class TemplateFailed(Exception):
    """The template refused or failed; the message is for the caller."""


class TemplateTooLong(Exception):
    """The template did not end in time, and its process was ended."""


class _Child:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, arguments: dict[str, Any], limit_s: float) -> str:
        """`render_jinja_template` of one conversation. Raises TemplateFailed, TemplateTooLong."""
        return self._ask("render", arguments, limit_s)

    def literal_text(self, template: str, limit_s: float) -> str:
        """What the template writes by itself, wherever in it. Compiling alone may take for ever: constants are folded.

        Raises TemplateFailed, TemplateTooLong.
        """
        return self._ask("literal", {"template": template}, limit_s)

    def _ask(self, what: str, arguments: dict[str, Any], limit_s: float) -> str:
        """Blocks, one at a time. A child that ended is replaced by the next call."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _write(process.stdin, {"what": what, "arguments": arguments, "limit_s": limit_s})
                reply = _read(process.stdout)
            except BrokenPipeError:
                reply = None
            if reply is None:
                code = self._end()
                if code == -signal.SIGALRM:
                    raise TemplateTooLong
                raise TemplateFailed("it took too much memory")
        if reply["failed"] is not None:
            raise TemplateFailed(reply["failed"])
        text: str = reply["text"]
        return text

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", "api_service.prepare.template_child"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def _end(self) -> int:
        """Its exit code; 0 when there is none."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process.wait()


def _write(pipe: BinaryIO | Any, message: dict[str, Any]) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(_LENGTH, "big") + data)
    pipe.flush()


def _read(pipe: BinaryIO | Any) -> dict[str, Any] | None:
    """None at the end of the pipe."""
    head = pipe.read(_LENGTH)
    if len(head) < _LENGTH:
        return None
    data = pipe.read(int.from_bytes(head, "big"))
    message: dict[str, Any] = msgspec.msgpack.decode(data)
    return message


def _serve() -> None:
    """The child: until its stdin ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    while (message := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, message["limit_s"])
        try:
            if message["what"] == "literal":
                text = template_literal_text(message["arguments"]["template"])
            else:
                text = render_jinja_template(**message["arguments"])[0][0]
            reply = {"text": text, "failed": None}
        except _FAULTS as error:
            reply = {"text": "", "failed": _reason(error)}
        except MemoryError:
            reply = {"text": "", "failed": "it took too much memory"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(sys.stdout.buffer, reply)


def _reason(error: BaseException) -> str:
    """The template's own words, or only the kind of failure."""
    message = error.message if isinstance(error, TemplateError) else None
    return message.splitlines()[0][:200] if message else f"{type(error).__name__} in the template"


_child = _Child()
render = _child.render
literal_text = _child.literal_text
atexit.register(_child.close)

if __name__ == "__main__":
    _serve()
