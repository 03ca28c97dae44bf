"""Logging of the worker: one line per event on standard error, readable on a terminal, JSON elsewhere.

Also shows how far loading has come. Nothing here or anywhere in the worker logs prompts, answers or keys.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["LoadingProgress", "configure_logs"]

_PLAIN_EVERY_S = 2.0

log = structlog.get_logger(__name__)


def configure_logs(level: str) -> None:
    """Sets up structlog and the standard library's logging alike. `level`: debug, info, warning or error."""
    terminal = sys.stderr.isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),
    ]
    render: list[Any] = (
        [structlog.dev.ConsoleRenderer()]
        if terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,  # made anew for every line it costs more than the line
    )


class LoadingProgress:
    """A bar on a terminal, a log line every two seconds elsewhere. Called from the loading thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last = time.monotonic()
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(f"loading {what}", total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        """`done` of `total` bytes are in memory; without a total, `what` is being done."""
        if not total:
            log.info(what)
            return
        with self._lock:
            if self._bar is not None:
                self._bar.update(self._task, completed=done, total=total)
            elif time.monotonic() - self._last >= _PLAIN_EVERY_S:
                self._last = time.monotonic()
                log.info("loading", model=self._what, percent=round(100 * done / max(total, 1)))
