"""A pod's door for grammars: says what is wrong with one before it is queued, in bounded time whatever it is.

In: a GrammarSpec. Out: nothing, or GrammarError. Owns one helper process (trial.py), started when first needed and
again after it had to be given up. Blocking and thread-safe; results are kept by content.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress

from shared.grammars.errors import GrammarError
from shared.params import GrammarSpec

__all__ = ["MAX_CHARACTERS", "MAX_DEPTH", "GrammarChecker"]

MAX_CHARACTERS = 512 * 1024
MAX_DEPTH = 64
_WALL_LIMIT_S = 5.0
"""The helper gives up after a second of its own processor time; this is for a machine too busy to let it run."""
_KEPT = 512
_TOO_COMPLEX = "it is too complex: compiling it took too long"


class GrammarChecker:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[str] | None = None
        self._known: OrderedDict[GrammarSpec, str] = OrderedDict()

    def check(self, spec: GrammarSpec) -> None:
        """Raises GrammarError (a reason for the client) for what cannot be compiled, never matches or is hostile."""
        if len(spec.text) > MAX_CHARACTERS:
            raise GrammarError(f"it has more than {MAX_CHARACTERS} characters")
        with self._lock:
            reason = self._known.get(spec)
            if reason is None:
                reason = self._known[spec] = self._ask(spec)
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
        if reason:
            raise GrammarError(reason)

    def close(self) -> None:
        """Ends the helper. A later check would start another."""
        with self._lock:
            self._give_up()

    def _ask(self, spec: GrammarSpec) -> str:
        helper = self._running()
        assert helper.stdin is not None
        assert helper.stdout is not None
        try:
            helper.stdin.write(json.dumps([spec.kind, spec.text]) + "\n")
            helper.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(helper.stdout, selectors.EVENT_READ)
                line = helper.stdout.readline() if selector.select(_WALL_LIMIT_S) else ""
        except BrokenPipeError:
            line = ""
        if not line:  # it has ended itself, or has to be ended
            self._give_up()
            return _TOO_COMPLEX
        reason: str = json.loads(line)
        return reason

    def _running(self) -> subprocess.Popen[str]:
        if self._helper is None or self._helper.poll() is not None:
            self._give_up()
            self._helper = subprocess.Popen(
                [sys.executable, "-m", "shared.grammars.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
        return self._helper

    def _give_up(self) -> None:
        helper, self._helper = self._helper, None
        if helper is None:
            return
        helper.kill()
        helper.wait()
        for pipe in (helper.stdin, helper.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
