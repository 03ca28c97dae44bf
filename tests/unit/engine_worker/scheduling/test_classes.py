"""Interactive before batch: seats, blocks, tokens of a step, preemption. Exact plans, without a clock."""

from __future__ import annotations

from engine_worker.plan import BatchPlan
from tests.support.scheduler_drive import SchedulerDrive, continuation


def ids(plan: BatchPlan | None) -> list[str]:
    assert plan is not None
    return [row.request_id for row in plan.rows]


def test_an_interactive_request_is_planned_before_batch_ones_whatever_their_priority() -> None:
    drive = SchedulerDrive(budget=64)
    drive.add([1] * 4, request_id="batch", klass="batch", priority=-5)
    drive.add([2] * 4, request_id="interactive", priority=5)
    assert ids(drive.step()) == ["interactive", "batch"]


def test_an_interactive_request_displaces_the_last_batch_one_when_all_seats_are_taken() -> None:
    drive = SchedulerDrive(max_num_seqs=3, budget=64)
    for name in "abc":
        drive.add([ord(name)] * 4, max_tokens=9, request_id=name, klass="batch")
    drive.step()
    drive.add([2] * 4, max_tokens=3, request_id="chat")
    plan = drive.step()
    assert plan is not None
    assert plan.preempted == ("c",)
    assert ids(plan) == ["chat", "a", "b"]
    drive.run()
    assert drive.outputs["c"] == continuation([ord("c")] * 4, 9)
    assert drive.scheduler.num_preemptions == 1


def test_batch_requests_never_displace_anyone() -> None:
    drive = SchedulerDrive(max_num_seqs=2, budget=64)
    for name in "ab":
        drive.add([ord(name)] * 4, max_tokens=4, request_id=name)
    drive.step()
    drive.add([9] * 4, request_id="batch", klass="batch", priority=-9)
    assert ids(drive.step()) == ["a", "b"]
    drive.run()
    assert drive.scheduler.num_preemptions == 0


def test_an_interactive_request_takes_blocks_of_batch_ones_last_first() -> None:
    drive = SchedulerDrive(num_blocks=12, block_size=4, budget=64, caching=False)
    for name in "abc":
        drive.add([ord(name)] * 12, max_tokens=4, request_id=name, klass="batch")
    drive.step()
    drive.add([1] * 20, max_tokens=2, request_id="chat")
    plan = drive.step()
    assert plan is not None
    assert plan.preempted == ("c", "b")
    assert ids(plan) == ["chat", "a"]
    drive.run()
    assert all(drive.outputs[name] == continuation([ord(name)] * 12, 4) for name in "abc")


def test_nobody_is_displaced_for_a_request_that_would_not_fit_even_then() -> None:
    drive = SchedulerDrive(num_blocks=12, block_size=4, budget=64, caching=False)
    drive.add([1] * 20, max_tokens=20, request_id="chat")
    drive.step()
    drive.add([2] * 4, max_tokens=2, request_id="batch", klass="batch")
    drive.step()
    drive.add([3] * 20, max_tokens=20, request_id="next")
    drive.step()
    assert drive.scheduler.num_preemptions == 0


def test_a_growing_interactive_request_takes_blocks_of_batch_ones_first() -> None:
    drive = SchedulerDrive(num_blocks=8, block_size=4, budget=64, caching=False)
    early = drive.add([1] * 4, max_tokens=24, request_id="early")
    drive.step()
    batch = drive.add([2] * 3, max_tokens=5, request_id="batch", klass="batch", arrival=-1)
    drive.run()
    assert early.num_preemptions == 0
    assert drive.outputs[batch.request_id] == continuation([2] * 3, 5)


def test_no_batch_request_begins_while_an_interactive_one_lacks_blocks() -> None:
    drive = SchedulerDrive(num_blocks=8, block_size=4, budget=64, caching=False)
    drive.add([1] * 16, max_tokens=12, request_id="first")
    drive.step()
    drive.add([2] * 20, max_tokens=2, request_id="second")
    drive.add([3] * 2, max_tokens=2, request_id="batch", klass="batch")
    order: list[str] = []
    while (plan := drive.step()) is not None:
        order += ids(plan)
    assert list(dict.fromkeys(order)) == ["first", "second", "batch"]


def test_a_prompt_of_an_interactive_request_goes_before_decodes_of_batch_ones() -> None:
    drive = SchedulerDrive(budget=8, caching=False)
    drive.add([1] * 2, max_tokens=9, request_id="batch", klass="batch")
    drive.step()
    drive.add([2] * 16, max_tokens=1, request_id="chat")
    assert [(row.request_id, row.num_new_tokens) for row in (drive.step() or BatchPlan(0, (), 0)).rows] == [("chat", 8)]


def test_a_displaced_request_finds_its_blocks_again() -> None:
    drive = SchedulerDrive(max_num_seqs=1, budget=64)
    batch = drive.add([1] * 30, max_tokens=9, klass="batch")
    for _ in range(4):
        drive.step()
    drive.add([2] * 4, max_tokens=2)
    drive.run()
    assert batch.num_preemptions == 1
    assert drive.outputs[batch.request_id] == continuation([1] * 30, 9)
    assert drive.computed_tokens == 30 + 8 + 4 + 1 + (33 % 4), "all but its last, unfinished block"
    assert batch.num_cached_tokens == 0, "which is no hit of its prompt"
