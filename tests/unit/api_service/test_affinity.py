"""Which worker a request is offered to, given what the registry says."""

from __future__ import annotations

from typing import Any

from api_service.affinity import Affinity
from api_service.registry_view import Snapshot
from shared.messages import WorkerCard
from shared.prefixes import fingerprints
from tests.support.records import make_request

LONG = tuple(range(1024))


def _view(held: dict[str, int], **running: int) -> Snapshot:
    """Workers that hold so many tokens of LONG and run so many sequences."""
    cards = tuple(
        WorkerCard(worker_id=name, model="tiny", max_num_seqs=64, running=running.get(name, 0)) for name in held
    )
    prefixes = {name: frozenset(digest for _, digest in fingerprints(LONG[:n])) for name, n in held.items()}
    return Snapshot({}, cards, {}, redis_ok=True, prefixes=prefixes)


def _prefer(view: Snapshot, prompt: Any = LONG, **changes: Any) -> str:
    return Affinity(lambda: view).prefer(make_request(prompts=(tuple(prompt),), **changes))


def test_the_longest_prefix_wins() -> None:
    assert _prefer(_view({"a": 256, "b": 512, "c": 0})) == "b"


def test_a_much_busier_worker_is_not_worth_its_cache() -> None:
    assert _prefer(_view({"a": 512, "b": 0}, a=10)) == "a"
    assert _prefer(_view({"a": 512, "b": 0}, a=20)) == "b"


def test_no_choice_no_preference() -> None:
    assert _prefer(_view({"a": 1024})) == ""
    assert _prefer(_view({"a": 1024, "b": 0}), prompt=(1, 2, 3)) == ""
    assert _prefer(_view({"a": 1024, "b": 0}), model="another") == ""


def test_workers_that_leave_or_hang_are_not_asked() -> None:
    view = _view({"a": 1024, "b": 0, "c": 0})
    draining = WorkerCard(worker_id="a", model="tiny", state="draining")
    assert _prefer(Snapshot({}, (draining, *view.workers[1:]), {}, True, prefixes=view.prefixes)) in ("b", "c")


def test_a_cold_prefix_goes_where_every_pod_sends_it_and_stays() -> None:
    view = _view({"a": 0, "b": 0, "c": 0})
    pods = [Affinity(lambda: view) for _ in range(4)]
    prompts = [tuple(range(n, n + 200)) for n in range(0, 20_000, 1000)]
    chosen = [{_prefer(view, prompt) for _ in pods} for prompt in prompts]
    assert all(len(one) == 1 for one in chosen)
    assert {name for one in chosen for name in one} == {"a", "b", "c"}
    pod = pods[0]
    assert len({pod.prefer(make_request(prompts=((*LONG, i),))) for i in range(5)}) == 1


def test_what_was_just_sent_counts_before_the_cards_tell() -> None:
    view = _view({"a": 128, "b": 0})
    pod = Affinity(lambda: view)
    sent = [pod.prefer(make_request(prompts=(LONG[:128] + (i,) * 64,))) for i in range(20)]
    assert sent.count("b") == sent.count("a") == 10  # ever in turn, once the cache is outweighed
    assert sent[:4] == ["a"] * 4
