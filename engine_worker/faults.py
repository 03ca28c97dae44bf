"""Faults that tests ask for with HEADRACE_FAULT; without it nothing here does anything.

In: the prompts about to run. Out: a death, a hang or a delay of the engine thread. docs/testing.md lists the switches.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

__all__ = ["FAULT_EXIT_CODE", "Faults"]

FAULT_EXIT_CODE = 99
_KINDS = ("exit-on-token", "hang-on-token", "step-delay-ms")


class Faults:
    """`spec` is a comma separated list of "<kind>:<number>". Raises ValueError naming the kinds."""

    def __init__(self, spec: str = "") -> None:
        self._numbers: dict[str, int] = {}
        self._armed = ""
        for part in filter(None, spec.split(",")):
            kind, _, number = part.partition(":")
            if kind not in _KINDS or not number.isdigit():
                raise ValueError(f"HEADRACE_FAULT={spec!r}: must be one of {', '.join(f'{k}:<n>' for k in _KINDS)}")
            self._numbers[kind] = int(number)

    def on_add(self, prompt_token_ids: Sequence[int]) -> None:
        """A prompt goes to the engine; the step under way or the next one runs it."""
        for kind in ("exit-on-token", "hang-on-token"):
            if self._numbers.get(kind) in prompt_token_ids:
                self._armed = kind

    def before_step(self) -> None:
        """Called by the engine thread before each step."""
        if delay := self._numbers.get("step-delay-ms"):
            time.sleep(delay / 1000)

    def after_step(self) -> None:
        """Called before the step's events are handed over: what kills or hangs its step never says a token."""
        if self._armed == "exit-on-token":
            os._exit(FAULT_EXIT_CODE)  # no hand-back: this plays a crash
        if self._armed == "hang-on-token":
            threading.Event().wait()
