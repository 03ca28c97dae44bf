"""The worker as a program: settings from the environment, one worker, an exit code.

0 after a drain; 2 when settings, model or Redis server cannot be used; 70 and 71 when the engine failed or hung.
"""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop

from engine_worker.logs import configure_logs
from engine_worker.settings import SettingsError, read_settings
from engine_worker.worker import EXIT_UNUSABLE, run_worker

__all__ = ["main"]


def main() -> int:
    """Runs one worker; returns its exit code."""
    # An engine thread without work sleeps: OpenMP's default spins, on cores that others need. Read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        settings = read_settings()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNUSABLE
    configure_logs(settings.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_worker(settings))
