"""The pod as a program: configured by environment variables. Exit code 2 for one that is not allowed."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from typing import Any

import structlog
import uvloop
from pydantic import ValidationError

from api_service.server import PodServer
from api_service.settings import Settings, describe_errors
from shared.connections import REDIS_DOWN, UnfitServer, check_server, command_client

__all__ = ["main"]

BAD_SETTINGS = 2

log = structlog.get_logger(__name__)


def main() -> int:
    try:
        settings = Settings()
    except ValidationError as error:
        print(describe_errors(error), file=sys.stderr)
        return BAD_SETTINGS
    _set_up_logging(settings.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings))
    except UnfitServer as error:
        print(error, file=sys.stderr)
        return BAD_SETTINGS
    return 0


async def _serve(settings: Settings) -> None:
    """Raises UnfitServer for a Redis that would lose requests; one that is away is waited for, /ready saying no."""
    redis = command_client(settings.redis_url)
    try:
        await check_server(redis)
    except REDIS_DOWN as error:
        log.warning("redis cannot be reached yet", error=str(error))
    finally:
        await redis.aclose()
    server = PodServer(settings)
    server.handle_signals()
    # 100,000 objects of the libraries, which no later collection, a pause for every stream, looks at again.
    gc.freeze()
    gc.enable()
    await server.serve()


def _set_up_logging(level: str) -> None:
    """One line an event on stderr: readable on a terminal, JSON elsewhere. No prompt, answer or key is ever logged."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(
        level=max(number, logging.WARNING), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    terminal = sys.stderr.isatty()
    render: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if terminal:
        render = [structlog.dev.ConsoleRenderer()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),  # as the worker
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
