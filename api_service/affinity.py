"""Which worker a request should be offered to first: the one that has most of its prompt cached, unless it is busier.

In: the prompt, the registry's snapshot, streams of what was offered before. Out: a worker's id, or "" for anybody. A
hint, kept by Redis for a moment while that worker has room; nothing is lost by a wrong one but a cache hit.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from api_service.registry_view import Snapshot
from api_service.stream import Stream
from shared.messages import GenerateRequest, WorkerCard
from shared.prefixes import Mark, fingerprints

__all__ = ["Affinity", "Preference"]

_TOKENS_A_SEQUENCE = 32
"""A worker may have one sequence more than the idlest for each so many tokens that it need not compute."""
_BACKLOG = 0.5
"""What a token counts that a worker has to compute before. Less than one that is computed only because the request
went elsewhere: that one costs everybody behind it as well."""
_SENT_S = 3.0
"""Until cards and fingerprints tell what became of a request: a second each for worker and pod, and its own time."""
_MOST_SENT = 20_000


@dataclass(frozen=True, slots=True)
class Preference:
    worker: str = ""
    """"" when there is no choice, or the prompt is too short to matter."""
    tokens: int = 0
    """Of the prompt, for that worker to compute."""


class Affinity:
    """One per pod. Remembers what it has just sent where: cards and fingerprints are up to two seconds old."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], *, enabled: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` in seconds."""
        self._enabled = enabled
        self._snapshot = snapshot
        self._clock = clock
        self._sent: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._seen: Snapshot | None = None
        self._since: Counter[str] = Counter()
        """Requests offered to a worker since the snapshot was made."""
        self._silent: list[tuple[Preference, Stream]] = []
        """Streams without a first record, as far as one knows."""

    def prefer(self, request: GenerateRequest) -> Preference:
        """Where the request should go; tell `follow` once it was accepted."""
        view = self._snapshot()
        if view is not self._seen:
            self._seen = view
            self._since.clear()
        workers = [card for card in view.serving() if card.model == request.model]
        if not self._enabled or len(workers) < 2:
            return Preference()
        marks = fingerprints(request.prompts[0], request.cache_salt)
        if not marks:
            return Preference()
        backlog, now = self._backlog(), self._clock()
        cached = {card.worker_id: self._cached(card.worker_id, marks, view, now) for card in workers}

        def merit(card: WorkerCard) -> tuple[float, bytes]:
            """Tokens saved, less what its load costs; among equals every pod chooses the same (rendezvous hashing)."""
            name = card.worker_id
            load = card.running + card.waiting + self._since[name]
            tie = hashlib.blake2b(marks[0][1] + name.encode(), digest_size=8).digest()
            return cached[name] - _TOKENS_A_SEQUENCE * load - _BACKLOG * backlog[name], tie

        chosen = max(workers, key=merit).worker_id
        self._since[chosen] += 1
        for _, digest in marks:
            self._sent[digest] = chosen, now
            self._sent.move_to_end(digest)
        while len(self._sent) > _MOST_SENT:
            self._sent.popitem(last=False)
        return Preference(chosen, request.prompt_tokens - cached[chosen])

    def follow(self, preference: Preference, stream: Stream) -> None:
        """Until the stream's first record the worker has its prompt to compute."""
        if preference.worker:
            self._silent.append((preference, stream))

    def _cached(self, name: str, marks: list[Mark], view: Snapshot, now: float) -> int:
        """Tokens of the prompt that the worker should have: as it says itself, or because they were just sent there."""
        held = view.prefixes.get(name, frozenset())
        for length, mark in reversed(marks):
            worker, at = self._sent.get(mark, ("", 0.0))
            if mark in held or (worker == name and now - at < _SENT_S):
                return length
        return 0

    def _backlog(self) -> Counter[str]:
        """By worker: tokens that it has to compute before any first token of what came later."""
        self._silent = [one for one in self._silent if one[1].last < 0 and not one[1].over and not one[1].left]
        backlog: Counter[str] = Counter()
        for preference, _ in self._silent:
            backlog[preference.worker] += preference.tokens
        return backlog
