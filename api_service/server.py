"""The HTTP server around the app: our own signals, so that a drain is ours to run before uvicorn closes anything.

SIGTERM or SIGINT: /ready says no, answers carry `Connection: close`, streams go on for drain_timeout_s, then end with
an error that says how to resume; only then uvicorn shuts down. A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from api_service.app import create_app, metrics_app
from api_service.http_protocol import EdgeLimits, PodProtocol, protocol_class
from api_service.services import Services
from api_service.settings import Settings

__all__ = ["PodServer"]

_GRACEFUL_S = 2
"""For uvicorn's own shutdown, when all streams are over."""
_OTHER_FILES = 128
"""Files and sockets besides the clients' connections: Redis, the metrics port, logs."""

log = structlog.get_logger(__name__)


def _config(app: FastAPI, settings: Settings, port: int, protocol: type[PodProtocol], **more: Any) -> uvicorn.Config:
    """What both servers have in common."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=port,
        http=protocol,
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        **more,
    )


def _within_file_limit(connections: int) -> int:
    """Raises the process's limit of open files as far as it may; the connections that then fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    fitting = max(1, soft - _OTHER_FILES)
    log.warning("fewer connections than asked for: the process may not open more files", max_connections=fitting)
    return fitting


class _Beside(uvicorn.Server):
    """A second server in the same process; signals are the first one's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class PodServer(uvicorn.Server):
    """A uvicorn server whose stop is a drain. `serve()` returns when it is over."""

    def __init__(self, settings: Settings) -> None:
        app = create_app(settings)
        self._services: Services = app.state.services
        protocol = protocol_class(
            EdgeLimits(
                max_header_bytes=settings.max_header_bytes,
                header_timeout_s=settings.header_timeout_s,
                body_timeout_s=settings.body_timeout_s,
                max_connections=_within_file_limit(settings.max_connections),
                refused=self._services.metrics.refused,
            )
        )
        super().__init__(
            _config(
                app,
                settings,
                settings.port,
                protocol,
                lifespan="on",
                timeout_keep_alive=settings.timeout_keep_alive,
                timeout_graceful_shutdown=_GRACEFUL_S,
            )
        )
        self._settings = settings
        self._stop = asyncio.Event()
        self._end = asyncio.Event()
        self.metrics_server: _Beside | None = None
        if settings.metrics_port is not None:
            beside = metrics_app(self._services)
            self.metrics_server = _Beside(_config(beside, settings, settings.metrics_port, protocol, lifespan="off"))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers stay out: see handle_signals()."""
        yield

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT begin the drain; SIGINT during it ends the process at once. Supervisors repeat SIGTERM."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self._drain_when_stopped(), name="drain")
        beside = self.metrics_server
        metrics = asyncio.create_task(beside.serve(), name="metrics") if beside is not None else None
        try:
            await super().serve(sockets)
        finally:
            drain.cancel()
            if beside is not None and metrics is not None:
                beside.should_exit = True
                await metrics

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
            log.info("listening", base_url=f"http://{host}:{port}/v1")

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second for the end; this one wakes for the second's Date header, or at the
        end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._end.wait()

    def end(self) -> None:
        """Shuts down without a drain."""
        self.should_exit = True
        self._end.set()

    def stop(self) -> None:
        """Begins the drain."""
        self._stop.set()

    def _interrupt(self) -> None:
        if self._stop.is_set():
            self.force_exit = True
            self.end()
        self.stop()

    async def _drain_when_stopped(self) -> None:
        await self._stop.wait()
        self._services.draining = True
        relay = self._services.relay
        log.info("draining", streams=relay.open_streams, limit_s=self._settings.drain_timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._services.admission.idle.wait()
        relay.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACEFUL_S):
                await self._services.admission.idle.wait()
        self.end()
