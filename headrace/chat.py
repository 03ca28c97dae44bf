"""`headrace chat`: a conversation in the terminal, or one answer where the question comes through a pipe.

In: lines typed or pasted. Out: the answer as it is generated. Ctrl-C stops the answer, not the program; the part
that was said stays in the conversation.
"""

from __future__ import annotations

import contextlib
import re
import select
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from headrace.chat_client import ChatClient, ChatError, ListedModel, Unreachable

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
_CALM: Mapping[str, float] = {"temperature": 0.4, "top_p": 0.9}
"""For models without generation defaults: the API's temperature of 1 makes small ones ramble."""


@dataclass(frozen=True)
class _Partner:
    """Who answers, and with which sampling fields."""

    client: ChatClient
    model: str
    sampling: Mapping[str, float]

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        return self.client.answer(self.model, messages, self.sampling)


def printable(text: str) -> str:
    """The text without control characters: a model's answer must not steer the terminal."""
    return _CONTROL.sub("", text)


def run(base_url: str, model: str, api_key: str, system: str, sampling: Mapping[str, float]) -> int:
    """Chats until the person leaves. `sampling`: what they chose of temperature and top_p.

    Returns the exit code: 1 the server could not be used, 2 the question is empty.
    """
    interactive = sys.stdin.isatty()
    errors = Console(stderr=True, highlight=False)
    with ChatClient(base_url, api_key) as client:
        try:
            question = "" if interactive else sys.stdin.read().strip()
            if not interactive and not question:
                errors.print("headrace chat: nothing to ask: standard input is empty")
                return 2
            partner = _partner(client, model, sampling)
            if interactive:
                _converse(partner, base_url, system)
                return 0
            for piece in partner.answer([*_opening(system), _turn("user", question)]):
                sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
        except ChatError as error:
            errors.print(f"headrace chat: {escape(str(error))}", soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


def _partner(client: ChatClient, model: str, chosen: Mapping[str, float]) -> _Partner:
    """The model asked for, else the server's first. What the person chose wins over the model's own defaults; where
    there are none, and the server says so, the calm ones are sent. Other servers are left to themselves."""
    listed = _listed(client, model)
    calm = _CALM if listed.defaults is not None and "temperature" not in listed.defaults else {}
    return _Partner(client, listed.id, chosen or calm)


def _listed(client: ChatClient, model: str) -> ListedModel:
    try:
        models = client.models()
    except Unreachable:
        raise
    except ChatError:
        if model:  # some servers list nothing: whether it has the model shows with the first question
            return ListedModel(model)
        raise
    if not model and not models:
        raise ChatError("the server has no model yet")
    return next((listed for listed in models if model in ("", listed.id)), ListedModel(model))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _opening(system: str) -> list[dict[str, str]]:
    return [_turn("system", system)] if system else []


def _converse(partner: _Partner, base_url: str, system: str) -> None:
    console = Console(highlight=False)
    with_ = "".join(f", {name} {value:g}" for name, value in partner.sampling.items())
    console.print(f"[bold]{escape(partner.model)}[/] [dim]at {escape(base_url)}{with_}. {_HELP}[/]")
    messages = _opening(system)
    for question in _questions(console):
        if question == "/reset":
            messages = _opening(system)
            console.print("[dim]A new conversation.[/]")
        elif question.startswith("/") and "\n" not in question and " " not in question:
            console.print(f"[dim]{escape(question)} is not a command. {_HELP}[/]")
        else:
            messages.append(_turn("user", question))
            answer = _show_answer(console, partner, messages)
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


def _show_answer(console: Console, partner: _Partner, messages: list[dict[str, str]]) -> str:
    """Prints the answer while it comes; returns what was said, which may be a part."""
    said: list[str] = []
    with contextlib.closing(partner.answer(messages)) as pieces:
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
