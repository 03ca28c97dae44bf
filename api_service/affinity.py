"""Which worker a request should be offered to first: the one that has most of its prompt cached, unless it is busier.

In: the prompt and the registry's snapshot. Out: a worker's id, or "" for anybody. A hint, kept by Redis for a moment
while that worker has room; nothing is lost by a wrong one but a cache hit.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable

from api_service.registry_view import Snapshot
from shared.messages import GenerateRequest, WorkerCard
from shared.prefixes import Mark, fingerprints

__all__ = ["Affinity"]

_TOKENS_A_SEQUENCE = 32
"""A worker may have one sequence more than the idlest for each so many tokens that it need not compute."""
_MOST_SENT = 20_000


class Affinity:
    """One per pod. Remembers what it has just sent where: cards and fingerprints are up to two seconds old."""

    def __init__(self, snapshot: Callable[[], Snapshot], *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._snapshot = snapshot
        self._sent: OrderedDict[bytes, str] = OrderedDict()
        self._seen: Snapshot | None = None
        self._since: Counter[str] = Counter()
        """Requests offered to a worker since the snapshot was made."""

    def prefer(self, request: GenerateRequest) -> str:
        """ "" when there is no choice, or the prompt is too short to matter."""
        view = self._snapshot()
        if view is not self._seen:
            self._seen = view
            self._since.clear()
        workers = [card for card in view.serving() if card.model == request.model]
        if not self._enabled or len(workers) < 2:
            return ""
        marks = fingerprints(request.prompts[0], request.cache_salt)
        if not marks:
            return ""
        chosen = max(workers, key=lambda card: self._merit(card, marks, view)).worker_id
        self._since[chosen] += 1
        for _, digest in marks:
            self._sent[digest] = chosen
            self._sent.move_to_end(digest)
        while len(self._sent) > _MOST_SENT:
            self._sent.popitem(last=False)
        return chosen

    def _merit(self, card: WorkerCard, marks: list[Mark], view: Snapshot) -> tuple[int, bytes]:
        """Tokens saved, less what its load costs; among equals every pod chooses the same (rendezvous hashing)."""
        name, held = card.worker_id, view.prefixes.get(card.worker_id, frozenset())
        cached = max((length for length, mark in marks if mark in held or self._sent.get(mark) == name), default=0)
        load = card.running + card.waiting + self._since[card.worker_id]
        tie = hashlib.blake2b(marks[0][1] + card.worker_id.encode(), digest_size=8).digest()
        return cached - _TOKENS_A_SEQUENCE * load, tie
