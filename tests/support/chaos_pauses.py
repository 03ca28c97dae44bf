"""What a pause over a worker's death consists of: until another worker has the request, waiting there, computing again.

In: when processes died, when clients got events, what the workers logged. Out: pauses with their parts, and a table.
Worker logs carry wall-clock times, everything else here is monotonic seconds.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.support.stream_client import Outcome

__all__ = ["Pause", "TakeOver", "describe", "find_pauses", "percentile", "take_overs"]

TOGETHER_S = 1.0
"""Take-overs of one worker that follow each other sooner belong together."""


@dataclass(frozen=True)
class TakeOver:
    rid: str
    worker: int
    at: float
    tries: int
    """Above 1: a suspect, which waited for a turn of its own."""


@dataclass(frozen=True)
class Pause:
    rid: str
    seconds: float
    """From the first worker's death to the next event; of each death, when several happened within it."""
    detection: float | None = None
    """From the death until another worker had acquired the request. None: several deaths, or no take-over was seen."""
    catch_up: float = 0.0
    """From there to the next event at the client."""
    queueing: float = 0.0
    """The part of it by which the first of all that were taken over together was faster."""
    together: int = 1
    tries: int = 1


def take_overs(logs: Sequence[Path]) -> list[TakeOver]:
    """All of them, by time, from the log files of the workers."""
    offset = time.time() - time.monotonic()
    found = []
    for worker, path in enumerate(logs):
        for line in path.read_text(errors="replace").splitlines():
            if '"request started"' not in line:
                continue
            entry = json.loads(line)
            if entry["epoch"] > 1:
                at = datetime.fromisoformat(entry["timestamp"]).timestamp() - offset
                found.append(TakeOver(entry["rid"], worker, at, entry["tries"]))
    return sorted(found, key=lambda one: one.at)


def find_pauses(
    outcomes: Iterable[Outcome], deaths: Sequence[tuple[str, float]], taken: Sequence[TakeOver]
) -> list[Pause]:
    """Gaps of streams that had spoken, over workers' deaths and not Redis being away as well; shortest first."""
    whole: list[Pause] = []
    parts: list[tuple[TakeOver, Pause]] = []
    for outcome in outcomes:
        for before, after in zip(outcome.arrivals, outcome.arrivals[1:], strict=False):
            spanned = [(kind, at) for kind, at in deaths if before < at < after]
            kinds = Counter(kind for kind, _ in spanned)
            if before < outcome.spoke_at or not kinds["worker"] or kinds["redis"]:
                continue
            dead = [at for kind, at in spanned if kind == "worker"]
            last = [one for one in taken if one.rid == outcome.rid and dead[-1] < one.at < after][-1:]
            seconds = (after - dead[0]) / len(dead)
            if len(dead) > 1 or not last:
                whole.append(Pause(outcome.rid, seconds))
            else:
                detection, catch_up = last[0].at - dead[0], after - last[0].at
                parts.append((last[0], Pause(outcome.rid, seconds, detection, catch_up, tries=last[0].tries)))
    return sorted([*whole, *_with_queueing(parts)], key=lambda pause: pause.seconds)


def _with_queueing(parts: list[tuple[TakeOver, Pause]]) -> list[Pause]:
    groups: list[list[tuple[TakeOver, Pause]]] = []
    for one in sorted(parts, key=lambda part: (part[0].worker, part[0].at)):
        last = groups[-1][-1][0] if groups else None
        if last is None or last.worker != one[0].worker or one[0].at - last.at > TOGETHER_S:
            groups.append([])
        groups[-1].append(one)
    result = []
    for group in groups:
        fastest = min(pause.catch_up for _, pause in group)
        for _, pause in group:
            queueing = pause.catch_up - fastest
            result.append(
                Pause(pause.rid, pause.seconds, pause.detection, pause.catch_up, queueing, len(group), pause.tries)
            )
    return result


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def describe(pauses: Sequence[Pause]) -> str:
    """A line for the whole, one for each part, one for each of the three longest."""
    known = [(pause, pause.detection) for pause in pauses if pause.detection is not None]
    rows = {
        "pause": [pause.seconds for pause in pauses],
        "= until another worker has it": [detection for _, detection in known],
        "+ waiting there for its turn": [pause.queueing for pause, _ in known],
        "+ computing prompt and answer again": [pause.catch_up - pause.queueing for pause, _ in known],
    }
    lines = [f"pauses over a worker's death: {len(pauses)}, with their parts known: {len(known)}"]
    lines += [
        f"  {name:<37} p50 {percentile(values, 0.5):5.2f} s  p99 {percentile(values, 0.99):5.2f} s"
        for name, values in rows.items()
        if values
    ]
    for pause, detection in known[-3:]:
        lines.append(
            f"  {pause.rid}: {pause.seconds:.2f} s = {detection:.2f} + {pause.queueing:.2f} + "
            f"{pause.catch_up - pause.queueing:.2f}, one of {pause.together} taken over together, tries {pause.tries}"
        )
    return "\n".join(lines)
