"""What the turn machine knows: whose turn it is, and what is left to workers with more empty seats.

In: what was submitted, taken, finished. Out: assertion errors where a real `take` gave something else. The rules are
those of docs/redis_protocol.md, written down another way: requests are dealt out seat by seat instead of by a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.messages import GenerateRequest

__all__ = ["TurnModel", "Waiting"]

FIRST_GUESS, LEARNING = 128.0, 0.2
WINDOW = 8
"""So many of a share's requests are looked at."""


@dataclass
class Share:
    virtual: float = 0.0
    usual: float = FIRST_GUESS


@dataclass(eq=False)
class Waiting:
    request: GenerateRequest
    young: bool
    """It came just now: it is for the worker with most empty seats."""


@dataclass
class TurnModel:
    weights: dict[str, float]
    floor: float = 0.0
    without_turn: set[str] = field(default_factory=set)
    """Shares whose turn was lost: if they send or end anything before it is back, they start anew."""
    indexed: set[str] = field(default_factory=set)
    """Waiting requests that the index knows: all of them, unless it was lost since the last take."""
    given: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.shares = {name: Share() for name in self.weights}
        self.waiting: dict[str, list[Waiting]] = {name: [] for name in self.weights}
        """In the order in which they must come."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def num_open(self) -> int:
        """Waiting or running."""
        return self.num_waiting + len(self.given) - len(self.ended)

    def arrives(self, request: GenerateRequest, young: bool) -> None:
        queue, share = self.waiting[request.share], self.shares[request.share]
        if not queue or request.share in self.without_turn:
            share.virtual = max(share.virtual, self.floor)
            self.without_turn.discard(request.share)
        self.indexed.add(request.rid)
        queue.append(Waiting(request, young))
        queue.sort(key=lambda one: one.request.priority)  # stable: then by arrival

    def leaves(self, name: str, which: int) -> GenerateRequest:
        """A waiting request was cancelled."""
        request = self.waiting[name].pop(which).request
        if self.waiting[name] and not any(one.request.rid in self.indexed for one in self.waiting[name]):
            self.without_turn.add(name)  # the last that the index knew of
        return request

    def ends(self, request: GenerateRequest, charged: float, completion: int, cached: int) -> None:
        self.ended.add(request.rid)
        share = self.shares[request.share]
        if not self.waiting[request.share] or request.share in self.without_turn:
            share.virtual = max(share.virtual, self.floor)
        real = request.prompt_tokens - cached + completion
        share.virtual = max(0.0, share.virtual + (real - charged) / self.weights[request.share])
        share.usual += LEARNING * (completion / request.num_choices - share.usual)

    def taken(self, rids: Sequence[str], room: int, others: Sequence[int]) -> list[tuple[GenerateRequest, float]]:
        """One worker with `room` got these, while others were seen with so many empty seats. With what each was
        charged."""
        self.without_turn.clear()
        self.indexed = {one.request.rid for queue in self.waiting.values() for one in queue}
        empty, left_some, taken = room, False, []
        levels = [_level(empty, others, self.num_waiting)]
        for rid in rids:
            assert rid not in self.given, "given twice"
            assert empty > 0, "no room was left"
            self.given.add(rid)
            one, passed_over = self._next(rid)
            left_some |= passed_over
            if one.young:
                assert not left_some, "one that came just now, after another was left to others"
                assert empty > min(levels)[0], "it is another worker's part"
            taken.append((one.request, self._charge(one.request)))
            empty -= one.request.num_choices
            levels.append(_level(max(0, empty), others, self.num_waiting))
        if empty > 0 and self.num_waiting:
            free = [one for queue in self.waiting.values() for one in queue[:WINDOW] if not one.young]
            assert not free, "room was left, and requests wait that have waited long enough"
            assert any(others), "left to others, and nobody else has a seat"
            assert empty <= max(upper for _, upper in levels), "left to others that have no more empty seats"
        return taken

    def _next(self, rid: str) -> tuple[Waiting, bool]:
        """The request, which must be the first that may be had of a share with the least virtual time; and whether
        others that came just now were passed over for it."""
        [name] = [name for name, queue in self.waiting.items() if any(one.request.rid == rid for one in queue)]
        queue, virtual = self.waiting[name], self.shares[name].virtual
        place = next(i for i, one in enumerate(queue) if one.request.rid == rid)
        earlier = [
            one
            for other, own in self.waiting.items()
            if self.shares[other].virtual < virtual - 0.01
            for one in own[:WINDOW]
        ]
        assert all(one.young for one in earlier), "another share's turn"
        assert place < WINDOW
        assert all(one.young for one in queue[:place]), "out of order within its share"
        return queue.pop(place), bool(earlier or place)

    def _charge(self, request: GenerateRequest) -> float:
        share = self.shares[request.share]
        cost = request.prompt_tokens + min(request.max_output_tokens, share.usual * request.num_choices)
        self.floor = max(self.floor, share.virtual)
        share.virtual += cost / self.weights[request.share]
        return cost


def _level(here: int, others: Sequence[int], waiting: int) -> tuple[float, float]:
    """Between which two numbers lie the empty seats with which a worker still gets one of those that came just now.

    They are dealt out one by one, each to whoever has most seats then; who is here already may be ahead by an eighth
    of them, two at most. In a backlog nobody waits for anybody, and nobody for workers that are full.
    """
    left = [here, *others]
    if waiting > sum(left) or not any(others):
        return -1.0, -1.0
    for _ in range(waiting):
        left[left.index(max(left))] -= 1
    ahead = min(2.0, waiting / 8)
    return max(left) - 1 - ahead, max(0.0, max(left) - ahead)
