"""`headrace chat`: a conversation in the terminal, or one answer where the question comes through a pipe.

In: lines typed or pasted. Out: the answer as it is generated. Ctrl-C stops the answer, not the program; the part
that was said stays in the conversation.
"""

from __future__ import annotations

import contextlib
import re
import select
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from headrace.chat_client import ChatClient, ChatError

try:  # editing, history and whole pastes at the prompt; a Python built without it still chats
    import readline
except ImportError:
    pass
else:
    readline.parse_and_bind("set enable-bracketed-paste on")

__all__ = ["printable", "run"]

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer; pasted lines stay together."
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PASTE_GAP_S = 0.03


def printable(text: str) -> str:
    """The text without control characters: a model's answer must not steer the terminal."""
    return _CONTROL.sub("", text)


def run(base_url: str, model: str, api_key: str, system: str) -> int:
    """Chats until the person leaves. Returns the exit code: 1 the server could not be used, 2 the question is empty."""
    interactive = sys.stdin.isatty()
    errors = Console(stderr=True, highlight=False)
    with ChatClient(base_url, api_key) as client:
        try:
            model = model or _first_model(client)
            if interactive:
                _converse(client, model, base_url, system)
                return 0
            question = sys.stdin.read().strip()
            if not question:
                errors.print("headrace chat: nothing to ask: standard input is empty")
                return 2
            for piece in client.answer(model, [*_opening(system), _turn("user", question)]):
                sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
        except ChatError as error:
            errors.print(f"headrace chat: {escape(str(error))}", soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


def _first_model(client: ChatClient) -> str:
    models = client.models()
    if not models:
        raise ChatError("the server has no model yet")
    return models[0]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _opening(system: str) -> list[dict[str, str]]:
    return [_turn("system", system)] if system else []


def _converse(client: ChatClient, model: str, base_url: str, system: str) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(model)}[/] [dim]at {escape(base_url)}. {_HELP}[/]")
    messages = _opening(system)
    for question in _questions(console):
        if question == "/reset":
            messages = _opening(system)
            console.print("[dim]A new conversation.[/]")
        elif question.startswith("/") and "\n" not in question and " " not in question:
            console.print(f"[dim]{escape(question)} is not a command. {_HELP}[/]")
        else:
            messages.append(_turn("user", question))
            answer = _show_answer(console, client, model, messages)
            if answer:
                messages.append(_turn("assistant", answer))
            else:
                messages.pop()  # an unanswered question would only confuse the next turn


def _questions(console: Console) -> Iterator[str]:
    """What the person asks, until they leave."""
    while True:
        try:
            line = input("\n> ")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim]/exit or Ctrl-D leaves.[/]")
            continue
        question = "\n".join([line, *_rest_of_paste()]).strip()
        if question in {"/exit", "/quit"}:
            return
        if question:
            yield question


def _rest_of_paste() -> Iterator[str]:
    """Lines that are there already: nobody types the next one that fast."""
    while select.select([sys.stdin], [], [], _PASTE_GAP_S)[0]:
        try:
            yield input()
        except EOFError:
            return


def _show_answer(console: Console, client: ChatClient, model: str, messages: list[dict[str, str]]) -> str:
    """Prints the answer while it comes; returns what was said, which may be a part."""
    said: list[str] = []
    with contextlib.closing(client.answer(model, messages)) as pieces:
        try:
            for piece in pieces:
                said.append(piece)
                console.out(printable(piece), end="", highlight=False)
        except KeyboardInterrupt:
            console.print("\n[dim]stopped[/]", end="")
        except ChatError as error:
            console.print(f"\n[red]{escape(str(error))}[/]", end="", soft_wrap=True)
    console.print()
    return "".join(said)
