"""The HTTP server around the app: our own signals, so that a drain is ours to run before uvicorn closes anything.

SIGTERM or SIGINT: /ready says no, answers carry `Connection: close`, streams go on for drain_timeout_s, then end with
an error that says how to resume; only then uvicorn shuts down. A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import structlog
import uvicorn

from api_service.app import create_app, metrics_app
from api_service.services import Services
from api_service.settings import Settings

__all__ = ["PodServer"]

_GRACEFUL_S = 2
"""For uvicorn's own shutdown, when all streams are over."""

log = structlog.get_logger(__name__)


class _Beside(uvicorn.Server):
    """A second server in the same process; signals are the first one's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class PodServer(uvicorn.Server):
    """A uvicorn server whose stop is a drain. `serve()` returns when it is over."""

    def __init__(self, settings: Settings) -> None:
        app = create_app(settings)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_level="warning",
                access_log=False,
                lifespan="on",
                ws="none",
                timeout_keep_alive=settings.timeout_keep_alive,
                timeout_graceful_shutdown=_GRACEFUL_S,
                server_header=False,
            )
        )
        self._settings = settings
        self._services: Services = app.state.services
        self._stop = asyncio.Event()
        self.metrics_server: _Beside | None = None
        if settings.metrics_port is not None:
            self.metrics_server = _Beside(
                uvicorn.Config(
                    metrics_app(self._services),
                    host=settings.host,
                    port=settings.metrics_port,
                    log_level="warning",
                    access_log=False,
                    lifespan="off",
                    ws="none",
                    server_header=False,
                )
            )

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

    def stop(self) -> None:
        """Begins the drain."""
        self._stop.set()

    def _interrupt(self) -> None:
        if self._stop.is_set():
            self.should_exit = self.force_exit = True
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
        self.should_exit = True
