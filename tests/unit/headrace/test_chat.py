"""The chat as a person meets it: the program itself, on a pipe and on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from headrace.chat import printable
from tests.support.openai_stub import OpenAIStub
from tests.support.wait import eventually_sync

WORDS = ["Hello ", "wor", "ld"]


def command(stub: OpenAIStub, *more: str) -> list[str]:
    return [sys.executable, "-m", "headrace", "chat", "--base-url", stub.base_url, *more]


def ask(stub: OpenAIStub, question: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(stub, *more), input=question, capture_output=True, text=True, check=False)


def test_a_piped_question_gets_one_answer_on_standard_output() -> None:
    with OpenAIStub(WORDS) as stub:
        run = ask(stub, "hi\n", "--system", "Be brief.")
    assert (run.returncode, run.stdout, run.stderr) == (0, "Hello world\n", "")
    body = stub.requests[-1][3]
    assert body["model"] == "stub-model"
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_an_empty_pipe_is_refused_and_nothing_is_asked() -> None:
    with OpenAIStub(WORDS) as stub:
        run = ask(stub, " \n", "--model", "m")
    assert run.returncode == 2
    assert "nothing to ask" in run.stderr
    assert stub.requests == []


def test_where_nobody_listens_the_way_to_a_server_is_told() -> None:
    with OpenAIStub(WORDS) as stub:
        pass
    for more in ([], ["--model", "m", "--temperature", "0"]):
        run = ask(stub, "hi", *more)
        assert run.returncode == 1
        assert "`headrace serve` starts a server here, --base-url names another" in run.stderr


def test_a_refused_question_fails_with_the_servers_words() -> None:
    with OpenAIStub(WORDS, status=401) as stub:
        run = ask(stub, "hi")
    assert run.returncode == 1
    assert "401: no such thing" in run.stderr


@pytest.mark.parametrize(
    ("told", "flags", "sent"),
    [
        (None, [], {}),
        ({}, [], {"temperature": 0.4, "top_p": 0.9}),
        ({}, ["--model", "stub-model"], {"temperature": 0.4, "top_p": 0.9}),
        ({}, ["--model", "another"], {}),
        ({"temperature": 0.7, "top_k": 20}, [], {}),
        ({"top_k": 20}, [], {"temperature": 0.4, "top_p": 0.9}),
        ({}, ["--temperature", "1"], {"temperature": 1}),
        (None, ["--top-p", "0.5", "--temperature", "0", "--model", "m"], {"temperature": 0, "top_p": 0.5}),
    ],
)
def test_a_model_without_defaults_is_asked_calmly(
    told: dict[str, float] | None, flags: list[str], sent: dict[str, float]
) -> None:
    """The person's choice, else the model's own defaults, else ours; a server that tells none is left to itself."""
    with OpenAIStub(WORDS) as stub:
        if told is not None:
            stub.model["generation_defaults"] = told
        assert ask(stub, "hi", *flags).returncode == 0
    body = stub.requests[-1][3]
    assert {key: body[key] for key in ("temperature", "top_p") if key in body} == sent


def test_the_key_may_come_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "k1,k2")
    with OpenAIStub(WORDS) as stub:
        assert ask(stub, "hi").returncode == 0
    assert stub.requests[-1][2]["Authorization"] == "Bearer k1"


@pytest.mark.parametrize("text", ["\x1b[2J", "a\x07b", "x\x9b31m", "\r"])
def test_an_answer_cannot_steer_the_terminal(text: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", printable(text))
    assert printable("line\n\ttab é 日本") == "line\n\ttab é 日本"


class Terminal:
    """The program on a pseudo terminal."""

    def __init__(self, stub: OpenAIStub) -> None:
        self.screen = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as a shell does; whoever runs the tests may ignore it
            os.execv(sys.executable, command(stub))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def shows(self, text: str, deadline_s: float = 20) -> None:
        """Waits until `text` is on the screen after what was waited for before."""
        end = time.monotonic() + deadline_s
        while text not in self.screen:
            assert time.monotonic() < end, f"no {text!r} in {self.screen!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self.screen += os.read(self._fd, 4096).decode("utf-8", "replace")
        self.screen = self.screen.split(text, 1)[1]

    def exit_code(self) -> int:
        statuses: list[int] = []

        def ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            statuses.append(status)
            return pid != 0

        eventually_sync(ended, what="the program ends")
        return os.waitstatus_to_exitcode(statuses[-1])


@contextmanager
def terminal(stub: OpenAIStub) -> Iterator[Terminal]:
    made = Terminal(stub)
    try:
        made.shows("> ")
        yield made
    finally:
        with suppress(ProcessLookupError):
            os.kill(made.pid, signal.SIGKILL)


def test_a_conversation_keeps_what_was_said_until_reset() -> None:
    with OpenAIStub(WORDS) as stub, terminal(stub) as person:
        person.type("one\n")
        person.shows("Hello world")
        person.shows("> ")
        person.type("two\n")
        person.shows("Hello world")
        person.shows("> ")
        person.type("/reset\n")
        person.shows("> ")
        person.type("three\n")
        person.shows("Hello world")
        person.shows("> ")
        person.type("/exit\n")
        assert person.exit_code() == 0
    asked = [[turn["content"] for turn in body["messages"]] for method, _, _, body in stub.requests if method == "POST"]
    assert asked == [["one"], ["one", "Hello world", "two"], ["three"]]


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    with OpenAIStub(WORDS) as stub, terminal(stub) as person:
        stub.hold.set()
        person.type("one\n")
        person.shows("Hello wor")
        person.type("\x03")
        person.shows("stopped")
        person.shows("> ")
        stub.hold.clear()
        person.type("two\n")
        person.shows("Hello world")
        person.shows("> ")
        person.type("\x04")
        assert person.exit_code() == 0
    assert any(method == "GONE" for method, *_ in stub.requests), "the server was not told that nobody listens any more"
    last = stub.requests[-1][3]["messages"]
    assert [turn["content"] for turn in last] == ["one", "Hello wor", "two"]


@pytest.mark.parametrize("bracketed", [True, False])
def test_pasted_lines_stay_one_question(bracketed: bool) -> None:
    paste = "def f():\n    return 1\nwhat is it?"
    with OpenAIStub(WORDS) as stub, terminal(stub) as person:
        person.type(f"\x1b[200~{paste}\x1b[201~\n" if bracketed else f"{paste}\n")
        person.shows("Hello world")
        person.shows("> ")
        person.type("/exit\n")
        assert person.exit_code() == 0
    assert [body["messages"][0]["content"] for method, _, _, body in stub.requests if method == "POST"] == [paste]
