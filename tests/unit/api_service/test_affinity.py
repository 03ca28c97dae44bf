"""Which worker a request is offered to, given what the registry says."""

from __future__ import annotations

from typing import Any

from api_service.affinity import Affinity, Preference
from api_service.registry_view import Snapshot
from api_service.stream import Stream
from shared.messages import WorkerCard, decode_record
from shared.prefixes import fingerprints
from tests.support.records import make_request, token_record

LONG = tuple(range(1024))


def _view(held: dict[str, int], **running: int) -> Snapshot:
    """Workers that hold so many tokens of LONG and run so many sequences."""
    cards = tuple(
        WorkerCard(worker_id=name, model="tiny", max_num_seqs=64, running=running.get(name, 0)) for name in held
    )
    prefixes = {name: frozenset(digest for _, digest in fingerprints(LONG[:n])) for name, n in held.items()}
    return Snapshot({}, cards, {}, redis_ok=True, prefixes=prefixes)


def _prefer(view: Snapshot, prompt: Any = LONG, **changes: Any) -> str:
    return Affinity(lambda: view).prefer(make_request(prompts=(tuple(prompt),), **changes)).worker


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
    assert len({pod.prefer(make_request(prompts=((*LONG, i),))).worker for i in range(5)}) == 1


def test_what_was_just_sent_counts_before_the_cards_tell() -> None:
    view = _view({"a": 128, "b": 0})
    pod = Affinity(lambda: view)
    sent = [pod.prefer(make_request(prompts=(LONG[:128] + (i,) * 64,))).worker for i in range(20)]
    assert sent.count("b") == sent.count("a") == 10  # ever in turn, once the cache is outweighed
    assert sent[:4] == ["a"] * 4


def test_what_was_sent_is_forgotten_once_the_worker_itself_would_tell() -> None:
    now, views = 100.0, [_view({"a": 0, "b": 0})]
    pod = Affinity(lambda: views[0], clock=lambda: now)
    first = pod.prefer(make_request(prompts=(LONG,)))
    assert first.tokens == 1024
    views[0] = _view({"a": 0, "b": 0}, **{first.worker: 5})
    assert pod.prefer(make_request(prompts=(LONG,))) == Preference(first.worker, 0)
    now += 10
    views[0] = _view({"a": 0, "b": 0}, **{first.worker: 5})
    again = pod.prefer(make_request(prompts=(LONG,)))
    assert again.worker != first.worker, "it does not say that it has it: it was evicted"
    assert again.tokens == 1024


def test_prompts_that_wait_to_be_computed_count_until_their_first_token() -> None:
    now, view = 100.0, _view({"a": 256, "b": 0})
    pod = Affinity(lambda: view, clock=lambda: now)
    streams = [Stream(make_request(), owned=True) for _ in range(3)]
    for stream in streams:
        pod.follow(Preference("a", 300), stream)
    cached = make_request(prompts=(LONG[:256],))
    assert pod.prefer(cached).worker == "b", "450 tokens' worth of waiting is more than 256 to compute"
    record = token_record(0)
    streams[0].push(record, decode_record(record))
    streams[1].left = True
    now, view = 110.0, _view({"a": 256, "b": 0})
    assert pod.prefer(cached).worker == "a"
