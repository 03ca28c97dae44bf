"""Why tests failed, said again at the end of a run: also of first tries whose second one passed.

In: pytest's reports. Out: a few lines per failed try, since what keeps a run's output may keep only its end.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

__all__ = ["PROCESS_LOGS", "Reasons"]

PROCESS_LOGS = "process logs"
"""Section of a report with the ends of the processes' logs."""
_MOST_TRIES = 6
_REASON_LINES, _LOG_LINES, _CAPTURED_LINES = 14, 4, 3
_LINE = 240


class Reasons:
    """A plugin of one run."""

    def __init__(self) -> None:
        self._failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome not in ("passed", "skipped"):  # "failed", or "rerun" as the rerun plugin calls it
            self._failed.append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._failed:
            return
        terminalreporter.section("why tests failed, tries that were repeated included")
        for report in self._failed[:_MOST_TRIES]:
            tries = sum(other.nodeid == report.nodeid for other in self._failed)
            terminalreporter.write_line(f"{report.nodeid} ({report.when}; failed tries: {tries})")
            for line in _reason(report):
                terminalreporter.write_line(f"    {line[:_LINE]}")
        if len(self._failed) > _MOST_TRIES:
            terminalreporter.write_line(f"and {len(self._failed) - _MOST_TRIES} more")


def _reason(report: pytest.TestReport) -> Iterator[str]:
    """Where it failed, the message with values, the ends of logs and of captured output."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        yield from report.longreprtext.splitlines()[-_REASON_LINES:]
    else:
        yield f"{crash.path}:{crash.lineno}"
        yield from crash.message.splitlines()[:_REASON_LINES]
    for name, text in report.sections:
        if name == PROCESS_LOGS:
            yield from _ends_of_logs(text)
        else:
            yield from (f"{name}: {line}" for line in text.splitlines()[-_CAPTURED_LINES:])


def _ends_of_logs(text: str) -> Iterator[str]:
    """The last lines of every process."""
    for log in text.split("--- ")[1:]:
        name, *lines = log.splitlines()
        yield from (f"{name}: {line}" for line in lines[-_LOG_LINES:])
