"""The operator's file of tenants while the pod runs: what is changed in it holds soon, without a restart.

In: the path. Out: the rules as they were when the file was last right. A file that is broken or gone while somebody
edits it takes nobody's limits away: the last good rules stay, a warning and a metric say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from api_service.tenants import Tenants, load_tenants

__all__ = ["TenantFile"]

LOOK_S = 2.0
"""Seconds between two looks at the file."""

_Mark = tuple[int, int, int] | None

log = structlog.get_logger(__name__)


class TenantFile:
    """`usable` hears after every change whether the file could be read."""

    def __init__(self, path: Path | None, usable: Callable[[bool], None], look_s: float = LOOK_S) -> None:
        """Raises ValueError with all that is wrong in the file. None: no file, no limits, equal weights."""
        self._path = path
        self._usable = usable
        self._look_s = look_s
        self._mark = _mark_of(path)  # before it is read: what changes meanwhile is read again
        self.tenants: Tenants = load_tenants(path)
        usable(True)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._path is not None:
            self._task = asyncio.create_task(self._watch(), name="tenants file")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        last = self._mark
        while True:
            await asyncio.sleep(self._look_s)
            mark = await asyncio.to_thread(_mark_of, self._path)
            if mark != self._mark and mark == last:  # at rest: half a file may look like a whole one without rules
                self._mark = mark
                await self._reload()
            last = mark

    async def _reload(self) -> None:
        try:
            self.tenants = await asyncio.to_thread(load_tenants, self._path)
        except ValueError as error:
            self._usable(False)
            log.warning("tenants file not used, the rules before it stay", path=str(self._path), reason=str(error))
        else:
            self._usable(True)
            log.info("tenants file read again", path=str(self._path))


def _mark_of(path: Path | None) -> _Mark:
    """What changes when the file, or the link to it, does; None when there is none."""
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
