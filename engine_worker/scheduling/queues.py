"""Who waits and who runs, by class and in order of precedence. Knows no blocks and no budget."""

from __future__ import annotations

from bisect import insort

from engine_worker.request import Klass, Request, RequestStatus

__all__ = ["Queues", "precedence"]


def precedence(request: Request) -> tuple[int, int]:
    """Sort key within a class: who is served first and loses its blocks last."""
    return request.priority, request.arrival


class Queues:
    """Every known request is in exactly one list: `waiting` or `running` of its class, in order of precedence."""

    def __init__(self) -> None:
        self.known: dict[str, Request] = {}
        self.waiting: dict[Klass, list[Request]] = {"interactive": [], "batch": []}
        self.running: dict[Klass, list[Request]] = {"interactive": [], "batch": []}

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running.values()))

    def add(self, request: Request) -> None:
        """A new request waits. Raises ValueError when its id is in use."""
        if request.request_id in self.known:
            raise ValueError(f"request id {request.request_id} is in use")
        self.known[request.request_id] = request
        request.status = RequestStatus.WAITING
        insort(self.waiting[request.klass], request, key=precedence)

    def start(self, request: Request) -> None:
        """A waiting request runs."""
        self.waiting[request.klass].remove(request)
        request.status = RequestStatus.RUNNING
        insort(self.running[request.klass], request, key=precedence)

    def put_back(self, request: Request) -> None:
        """A running request waits again."""
        self.running[request.klass].remove(request)
        request.status = RequestStatus.WAITING
        insort(self.waiting[request.klass], request, key=precedence)

    def remove(self, request: Request) -> None:
        """The request has ended."""
        queue = self.waiting if request.status is RequestStatus.WAITING else self.running
        queue[request.klass].remove(request)
        del self.known[request.request_id]
        request.status = RequestStatus.FINISHED

    def last_running(self) -> Request:
        """Who loses its blocks first: of the lowest class, the last."""
        return (self.running["batch"] or self.running["interactive"])[-1]

    def check_integrity(self) -> None:
        """Raises AssertionError with what is wrong."""
        for status, lists in ((RequestStatus.WAITING, self.waiting), (RequestStatus.RUNNING, self.running)):
            for klass, queue in lists.items():
                if queue != sorted(queue, key=precedence):
                    raise AssertionError(f"the {status.value} {klass} queue is out of order")
                if any(request.status is not status or request.klass != klass for request in queue):
                    raise AssertionError(f"a request in the {status.value} {klass} queue belongs elsewhere")
            if status is RequestStatus.WAITING and any(r.block_table for queue in lists.values() for r in queue):
                raise AssertionError("a waiting request holds blocks")
        if self.num_waiting + self.num_running != len(self.known):
            raise AssertionError("a request is in no queue or in two")
