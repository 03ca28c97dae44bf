"""What a step computes: budget, order, admission, preemption. Exact plans on small pools."""

from __future__ import annotations

import pytest

from engine_worker.plan import BatchPlan
from engine_worker.request import RequestStatus
from tests.support.scheduler_drive import SchedulerDrive, continuation


def rows(plan: BatchPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [(row.request_id, row.start, row.num_new_tokens, row.samples) for row in plan.rows]


def test_a_short_request_is_computed_whole_and_then_token_by_token() -> None:
    drive = SchedulerDrive()
    drive.add(6, max_tokens=3, request_id="a")
    assert rows(drive.step()) == [("a", 0, 6, True)]
    assert rows(drive.step()) == [("a", 6, 1, True)]
    assert rows(drive.step()) == [("a", 7, 1, True)]
    assert drive.step() is None
    assert drive.outputs["a"] == continuation(range(1, 7), 3)


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    drive = SchedulerDrive(budget=8, caching=False)
    drive.add([60, 61], max_tokens=5, request_id="short")
    drive.step()
    drive.add(18, max_tokens=1, request_id="long")
    assert rows(drive.step()) == [("short", 2, 1, True), ("long", 0, 7, False)]
    assert rows(drive.step()) == [("short", 3, 1, True), ("long", 7, 7, False)]
    assert rows(drive.step()) == [("short", 4, 1, True), ("long", 14, 4, True)]


def test_a_small_rest_of_a_prompt_does_not_wait_for_another_step() -> None:
    """Of a budget of 144 tokens the last 16 are for ends of prompts."""
    drive = SchedulerDrive(budget=144, num_blocks=200, caching=False)
    drive.add(272, max_tokens=1, request_id="fits")
    assert rows(drive.step()) == [("fits", 0, 128, False)]
    assert rows(drive.step()) == [("fits", 128, 144, True)]
    drive.add(273, max_tokens=1, request_id="does not")
    assert [row[1:3] for _ in range(3) for row in rows(drive.step())] == [(0, 128), (128, 128), (256, 17)]


def test_the_last_of_several_prompts_may_take_what_is_left_for_ends_once() -> None:
    drive = SchedulerDrive(budget=144, num_blocks=200, caching=False)
    for name, length in (("a", 120), ("b", 24), ("c", 1)):
        drive.add(length, request_id=name, max_tokens=1)
    assert rows(drive.step()) == [("a", 0, 120, True), ("b", 0, 24, True)]
    assert rows(drive.step()) == [("c", 0, 1, True)]


def test_running_streams_do_not_wait_longer_for_the_rest_of_a_prompt_unless_more_wait_than_run() -> None:
    drive = SchedulerDrive(budget=144, num_blocks=200, caching=False)
    drive.add(2, request_id="stream", max_tokens=9)
    drive.step()
    drive.add(128, request_id="a", max_tokens=1)
    assert rows(drive.step()) == [("stream", 2, 1, True), ("a", 0, 127, False)]
    assert rows(drive.step()) == [("stream", 3, 1, True), ("a", 127, 1, True)]
    for name in ("b", "c"):
        drive.add(128, request_id=name, max_tokens=1)
    assert rows(drive.step()) == [("stream", 4, 1, True), ("b", 0, 128, True)]


def test_batch_work_leaves_the_ends_of_interactive_prompts_their_share() -> None:
    drive = SchedulerDrive(budget=144, num_blocks=200, caching=False)
    drive.add(4, request_id="stream", max_tokens=3)
    drive.add(125, request_id="batch", max_tokens=1, klass="batch")
    assert rows(drive.step()) == [("stream", 0, 4, True), ("batch", 0, 124, False)]


def test_decodes_go_before_the_chunks_of_an_earlier_long_prompt() -> None:
    drive = SchedulerDrive(budget=4, caching=False)
    drive.add([60], request_id="late", max_tokens=30, arrival=9)
    drive.step()
    drive.add(10, request_id="early", max_tokens=1, arrival=1)
    assert rows(drive.step()) == [("late", 1, 1, True), ("early", 0, 3, False)]
    assert rows(drive.step()) == [("late", 2, 1, True), ("early", 3, 3, False)]


def test_requests_join_in_order_of_priority_then_arrival() -> None:
    drive = SchedulerDrive(max_num_seqs=2, budget=64, caching=False)
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        drive.add(4, request_id=name, priority=priority)
    assert [row[0] for row in rows(drive.step())] == ["b", "c"]


def test_the_blocks_of_a_batch_are_exactly_these() -> None:
    drive = SchedulerDrive(block_size=4, budget=64)
    drive.add(9, request_id="a")
    drive.add([60] * 4, request_id="b")
    plan = drive.step()
    assert plan is not None
    assert [row.block_table for row in plan.rows] == [[0, 1, 2], [3]]


def test_a_request_that_lacks_blocks_is_not_overtaken() -> None:
    drive = SchedulerDrive(num_blocks=6, block_size=4, budget=64, caching=False)
    drive.add(9, max_tokens=3, request_id="a")
    drive.add(16, max_tokens=1, request_id="big")
    drive.add(2, max_tokens=1, request_id="small")
    order: list[str] = []
    while (plan := drive.step()) is not None:
        order += [row.request_id for row in plan.rows]
    assert list(dict.fromkeys(order)) == ["a", "big", "small"]


def test_the_latest_arrival_loses_its_blocks_first() -> None:
    drive = SchedulerDrive(num_blocks=4, block_size=4, budget=64, caching=False)
    first, second = drive.add([1] * 4, max_tokens=9), drive.add([2] * 4, max_tokens=9)
    preempted: list[str] = []
    while (plan := drive.step()) is not None:
        preempted += plan.preempted
    assert set(preempted) <= {second.request_id}
    assert first.num_preemptions == 0
    assert drive.outputs[first.request_id] == continuation([1] * 4, 9)
    assert drive.outputs[second.request_id] == continuation([2] * 4, 9)


def overfull(priorities: tuple[int, int, int], headroom: int, monkeypatch: pytest.MonkeyPatch) -> SchedulerDrive:
    """Three requests that grow out of their pool together."""
    monkeypatch.setattr("engine_worker.scheduling.scheduler.HEADROOM_TOKENS", headroom)
    drive = SchedulerDrive(num_blocks=8, block_size=4, budget=64, caching=False)
    for number, priority in enumerate(priorities):
        drive.add([number + 1] * 6, max_tokens=12, request_id=f"r{number}", priority=priority)
    return drive


def test_the_lowest_priority_loses_its_blocks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = overfull((5, 0, 1), 0, monkeypatch)
    while not (plan := drive.step()).preempted:  # type: ignore[union-attr]
        pass
    assert plan is not None
    assert plan.preempted[0] == "r0"
    drive.run()
    assert drive.outputs == {f"r{n}": continuation([n + 1] * 6, 12) for n in range(3)}


def test_nobody_is_admitted_in_a_step_that_ran_out_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even who would go first and would fit into what the victim left: that is there a step later."""
    drive = overfull((0, 0, 0), 0, monkeypatch)
    quiet = 0
    while not (drive.step() or pytest.fail("it ran out of blocks before")).preempted:
        quiet += 1
    drive = overfull((0, 0, 0), 0, monkeypatch)
    for _ in range(quiet):
        drive.step()
    drive.add([60], max_tokens=1, request_id="urgent", priority=-1)
    plan = drive.step()
    assert plan is not None
    assert plan.preempted == ("r2",)
    assert {row.request_id for row in plan.rows} == {"r0", "r1"}
    assert drive.cache.pool.num_available > 0
    assert ("urgent", 0, 1, True) in rows(drive.step())


def test_headroom_makes_preemption_rare() -> None:
    drive = SchedulerDrive(num_blocks=8, block_size=4, budget=64, caching=False)
    for number in range(6):
        drive.add([number + 1] * 6, max_tokens=12)
    drive.run()
    assert drive.scheduler.num_preemptions == 0


def test_every_running_request_fits_into_the_budget() -> None:
    drive = SchedulerDrive(max_num_seqs=48, budget=3, caching=False)
    for number in range(6):
        drive.add([number + 1] * 5, max_tokens=4)
    while (plan := drive.step()) is not None:
        assert len(plan.rows) <= 3
    assert len(drive.outputs) == 6


def test_a_request_whose_prefix_is_being_computed_waits_one_step_and_is_overtaken_meanwhile() -> None:
    drive = SchedulerDrive(budget=32)
    drive.add(10, request_id="first")
    drive.add(10, request_id="twin")
    drive.add([60] * 3, request_id="other")
    assert rows(drive.step()) == [("first", 0, 10, True), ("other", 0, 3, True)]
    assert rows(drive.step()) == [("first", 10, 1, True), ("other", 3, 1, True), ("twin", 8, 2, True)]


def test_choices_of_one_request_compute_the_prompt_once() -> None:
    drive = SchedulerDrive(budget=64)
    requests = [drive.add(23, max_tokens=4) for _ in range(5)]
    drive.run()
    assert drive.computed_tokens == 23 + 4 * 3 + 5 * 3
    assert [request.num_cached_tokens for request in requests] == [0, 20, 20, 20, 20]


def test_a_preempted_request_keeps_its_first_count_of_cached_tokens() -> None:
    drive = SchedulerDrive(num_blocks=16, block_size=4)
    drive.add(8, max_tokens=1)
    drive.run()
    request = drive.add(9, max_tokens=8)
    drive.step()
    assert request.num_cached_tokens == 8
    drive.scheduler._preempt(request)
    drive.run()
    assert request.num_cached_tokens == 8


def test_a_finished_request_is_unknown_and_its_id_may_come_again() -> None:
    drive = SchedulerDrive()
    request = drive.add(3, max_tokens=1, request_id="a")
    drive.run()
    assert drive.scheduler.get("a") is None
    assert request.status is RequestStatus.FINISHED
    drive.add(3, max_tokens=1, request_id="a")
    drive.run()


@pytest.mark.parametrize("computed_steps", [0, 1, 3])
def test_a_request_can_end_at_any_time_and_leaves_nothing(computed_steps: int) -> None:
    drive = SchedulerDrive(budget=4, caching=False)
    request = drive.add(10, max_tokens=50)
    for _ in range(computed_steps):
        drive.step()
    drive.scheduler.finish(request)
    assert drive.step() is None
    assert drive.cache.pool.num_free == drive.cache.pool.num_blocks
