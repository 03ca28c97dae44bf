"""Tables for the terminal. In: columns and rows. Out: text as wide as the terminal, or in a pipe as its content."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["console", "table"]

_PIPE_WIDTH = 1000


def console() -> Console:
    """Standard output; nothing is cut off where it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> Table:
    """A table without lines. The first column, the name of the row, is never cut; numbers are set right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for position, column in enumerate(columns):
        numbers = bool(rows) and all(isinstance(row[position], int | float) for row in rows)
        made.add_column(
            column, justify="right" if numbers else "left", no_wrap=position == 0, overflow="fold", header_style="dim"
        )
    for row in rows:
        made.add_row(*map(str, row))
    return made
