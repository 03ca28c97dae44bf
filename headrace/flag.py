"""What a flag is: one setting as an option of the command line and as a variable of the program that it starts.

In: declarations (flags.py). Out: `Flag`, and the decorator `takes`, which gives a command its flags and hands it those
that were set, as environment variables.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

__all__ = ["Flag", "takes"]

_CREDENTIALS = re.compile(r"//[^/@]*@")


@dataclass(frozen=True)
class Flag:
    """One setting. `field` "max_num_seqs" is flag --max-num-seqs and variable HEADRACE_MAX_NUM_SEQS."""

    field: str
    kind: Any
    """Type of one value as typer takes it: int, float, str, bool, a Literal, or list[str] for a repeatable flag."""
    help: str
    default: str
    """What holds when the flag is absent, for --help; the programs own the value itself."""
    low: float | None = None
    high: float | None = None
    check: Callable[[str], str | None] | None = None
    """Says what is allowed when the value is not, else None."""
    envs: tuple[str, ...] = ()
    variable: bool = True
    """False: an option only, for a command of this package; `env` is then no more than its key in `settings`."""
    panel: str = "Engine"

    @property
    def env(self) -> str:
        """The variable that the programs read."""
        return f"HEADRACE_{self.field.upper()}"

    @property
    def option(self) -> str:
        return "--" + self.field.replace("_", "-")

    def parameter(self) -> inspect.Parameter:
        """This flag as a keyword parameter of a typer command; None when it is absent."""
        names = f"{self.option}/--no-{self.option[2:]}" if self.kind is bool else self.option
        info = typer.Option(
            names,
            envvar=(list(self.envs) or self.env) if self.variable else None,
            help=self.help,
            show_default=self.default,
            metavar=self._range("..") or (f"[{'|'.join(self._choices)}]" if self._choices else None),
            callback=self._checked,
            rich_help_panel=self.panel,
        )
        # Numbers and choices are read here, not by typer: its words for a bad one are those of a validation library.
        kind = self.kind if self.kind in (bool, str, list[str]) else str
        annotation: Any = Annotated[(kind | None, info)]
        return inspect.Parameter(self.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def spelled(self, value: object) -> str:
        """The value as an environment variable holds it."""
        if isinstance(value, list | tuple):
            return ",".join(part.strip() for item in value for part in str(item).split(",") if part.strip())
        return str(value).lower() if isinstance(value, bool) else str(value)

    @property
    def _choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def _range(self, joint: str) -> str | None:
        if self.low is None:
            return None
        return f"{self.low:g}{joint}{self.high:.9g}" if self.high is not None else f"{self.low:g}{joint}".strip()

    def _checked(self, context: typer.Context, value: Any) -> Any:
        """typer's callback: the value, if it may be used."""
        if value is None:
            return None
        try:
            return self._parsed(value)
        except ValueError as error:
            shown = _CREDENTIALS.sub("//***@", value) if isinstance(value, str) else value
            raise typer.BadParameter(
                f"{shown!r} is not allowed: {error}.", param_hint=self._given_as(context)
            ) from None

    def _parsed(self, value: Any) -> Any:
        """Raises ValueError that says what is allowed."""
        if self.check and (allowed := self.check(value)):
            raise ValueError(allowed)
        if self._choices and value not in self._choices:
            raise ValueError(f"one of {', '.join(self._choices)}")
        return self._number(value) if self.kind in (int, float) else value

    def _number(self, text: str) -> int | float:
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        try:
            number: int | float = self.kind(text)
            if low <= number <= high:
                return number
        except ValueError:
            pass  # it is no number, which the same words tell
        limits = f" from {self._range(' to ')}" if high < math.inf else f", {low:g} or more"
        raise ValueError(f"a {'whole ' if self.kind is int else ''}number{limits}")

    def _given_as(self, context: typer.Context) -> str:
        """What the person wrote it as: the flag, or the variable that held the value."""
        source = context.get_parameter_source(self.field)
        if source is not None and source.name == "COMMANDLINE":
            return f"'{self.option}'"
        held = [name for name in self.envs or (self.env,) if os.environ.get(name)]
        return f"'{held[0]}' (the variable of {self.option})" if held else f"'{self.option}'"


def takes(*flags: Flag) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a typer command these flags. It receives `settings`: variable name -> value of each flag that was set."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        parameters = [*own, *(flag.parameter() for flag in flags)]

        @wraps(command)
        def run(**values: Any) -> None:
            given = {flag: values.pop(flag.field) for flag in flags}
            command(**values, settings={f.env: f.spelled(v) for f, v in given.items() if v is not None and v != []})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
