"""Faults that users of other engines reported, areas scheduler and kvcache: one test per case, named after its id."""

from __future__ import annotations

import random

import pytest

from engine_worker.request import Klass, Request
from tests.support.scheduler_drive import SchedulerDrive, continuation


def run_with_preemptions(drive: SchedulerDrive, request: Request, at_outputs: list[int]) -> None:
    """Runs to the end; once the request has put out that many tokens (again and again), it loses its blocks."""
    pending = list(at_outputs)
    for _ in range(1000):
        while pending and request.block_table and len(request.output_token_ids) >= pending[0]:
            pending.pop(0)
            drive.scheduler._preempt(request)
        if drive.step() is None:
            assert not pending
            return
    raise AssertionError("not finished")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("at", [[1], [3], [4], [5], [5, 5], [1, 3, 4, 4, 5, 9]])
def test_sc_02_preemption_changes_no_token_and_counts_none_twice(at: list[int], caching: bool) -> None:
    drive = SchedulerDrive(block_size=4, budget=3, caching=caching)
    request = drive.add(6, max_tokens=10)
    neighbour = drive.add([60] * 5, max_tokens=10)
    run_with_preemptions(drive, request, at)
    assert request.num_preemptions == len(at)
    assert drive.outputs[request.request_id] == continuation(range(1, 7), 10)
    assert drive.outputs[neighbour.request_id] == continuation([60] * 5, 10)


def test_sc_02_preemption_before_the_first_token() -> None:
    drive = SchedulerDrive(block_size=4, budget=3)
    request = drive.add(7, max_tokens=4)
    drive.step()
    drive.scheduler._preempt(request)
    drive.run()
    assert drive.outputs[request.request_id] == continuation(range(1, 8), 4)


def test_sc_03_prompt_and_output_stay_apart_through_preemption_and_take_over() -> None:
    whole = continuation(range(1, 7), 12)
    drive = SchedulerDrive(block_size=4, budget=5)
    preempted = drive.add(6, max_tokens=12)
    taken_over = drive.add(6, max_tokens=12, output=whole[:7])
    run_with_preemptions(drive, preempted, [7])
    for request in (preempted, taken_over):
        assert request.prompt_token_ids == list(range(1, 7))
        assert request.output_token_ids == whole


def test_sc_04_cache_hits_after_preemption_never_reach_past_the_known_tokens() -> None:
    prefix = list(range(1, 9))
    for round_ in range(200):
        rng = random.Random(round_)
        drive = SchedulerDrive(num_blocks=rng.randint(8, 14), block_size=4, budget=rng.choice([5, 16, 64]))
        expected: dict[str, list[int]] = {}
        for _ in range(16):
            prompt = prefix[: rng.randint(1, 8)] + [rng.randint(0, 49)] * rng.randint(0, 3)
            request = drive.add(prompt, max_tokens=rng.randint(1, 10))
            expected[request.request_id] = continuation(prompt, request.max_tokens)
        drive.run()
        assert drive.outputs == expected


def test_sc_04_five_hundred_short_requests_share_a_prefix_in_a_tiny_pool() -> None:
    rng = random.Random(7)
    drive = SchedulerDrive(num_blocks=12, block_size=4, max_num_seqs=16, budget=24)
    expected: dict[str, list[int]] = {}
    for number in range(512):
        prompt = [5, 6, 7, 8, 9, 10, 11, 12, *(rng.randint(0, 49) for _ in range(number % 5))]
        request = drive.add(prompt, max_tokens=rng.randint(1, 6), klass="batch" if number % 4 == 0 else "interactive")
        expected[request.request_id] = continuation(prompt, request.max_tokens)
    drive.run()
    assert drive.outputs == expected


@pytest.mark.parametrize("length", range(1, 18))
def test_sc_06_the_same_prompt_twice_always_leaves_a_token_to_compute(length: int) -> None:
    drive = SchedulerDrive(block_size=4, budget=64)
    for _ in range(2):
        request = drive.add(length, max_tokens=1)
        drive.run()
        assert drive.outputs[request.request_id] == continuation(range(1, length + 1), 1)
    assert request.num_cached_tokens == (length - 1) // 4 * 4


@pytest.mark.parametrize(("num_prompt", "fits"), [(30, True), (31, True), (32, False), (33, False)])
def test_sc_07_sc_08_what_can_never_fit_is_refused_exactly_at_the_capacity(num_prompt: int, fits: bool) -> None:
    drive = SchedulerDrive(num_blocks=8, block_size=4, budget=16)
    assert drive.scheduler.max_request_tokens() == 32
    drive.add(5, max_tokens=3)
    if fits:
        drive.add(num_prompt, max_tokens=32 - num_prompt)
    else:
        with pytest.raises(ValueError, match="32 at most"):
            drive.add(num_prompt, max_tokens=1)
    follower = drive.add([60] * 5, max_tokens=3)
    drive.run(100)
    assert drive.outputs[follower.request_id] == continuation([60] * 5, 3)


def test_sc_08_the_window_bounds_a_request_where_the_cache_is_larger() -> None:
    drive = SchedulerDrive(num_blocks=8, block_size=4, max_model_len=20)
    drive.add(19, max_tokens=1)
    with pytest.raises(ValueError, match="20 at most"):
        drive.add(19, max_tokens=2)


def test_sc_10_an_ample_pool_preempts_nobody_and_computes_nothing_twice() -> None:
    drive = SchedulerDrive(num_blocks=400, block_size=4, max_num_seqs=16, budget=32)
    rng = random.Random(0)
    needed = 0
    for _ in range(16):
        prompt = [rng.randint(0, 49) for _ in range(rng.randint(1, 80))]
        request = drive.add(prompt, max_tokens=rng.randint(1, 40))
        needed += len(prompt) + request.max_tokens - 1
    drive.run()
    assert drive.scheduler.num_preemptions == 0
    assert drive.computed_tokens <= needed


@pytest.mark.parametrize("caching", [True, False])
def test_sc_10_a_pool_for_a_third_of_the_requests_does_not_thrash(caching: bool) -> None:
    rng = random.Random(1)
    prompts = [[rng.randint(0, 49) for _ in range(rng.randint(10, 120))] for _ in range(48)]
    limits = [rng.randint(20, 200) for _ in prompts]
    needed_blocks = sum(-(-(len(p) + m) // 4) for p, m in zip(prompts, limits, strict=True))
    drive = SchedulerDrive(num_blocks=needed_blocks // 3, block_size=4, max_num_seqs=48, budget=64, caching=caching)
    requests = [drive.add(p, max_tokens=m) for p, m in zip(prompts, limits, strict=True)]
    drive.run()
    minimum = sum(len(p) + m - 1 for p, m in zip(prompts, limits, strict=True))
    assert drive.computed_tokens <= 1.6 * minimum
    assert max(request.num_preemptions for request in requests) <= 3
    assert all(drive.outputs[r.request_id] == continuation(r.prompt_token_ids, r.max_tokens) for r in requests)


def test_sc_11_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    drive = SchedulerDrive()
    drive.add(5, request_id="same")
    with pytest.raises(ValueError, match="in use"):
        drive.add([60], request_id="same")
    drive.run()
    assert drive.outputs["same"] == continuation(range(1, 6), 4)


def test_sc_15_a_thousand_aborts_leave_no_block_and_no_slot_behind() -> None:
    rng = random.Random(2)
    drive = SchedulerDrive(num_blocks=40, block_size=4, max_num_seqs=6, budget=24)
    aborted = 0
    while aborted < 1000:
        while drive.scheduler.num_waiting < 4:
            drive.add([rng.randint(0, 49) for _ in range(rng.randint(1, 30))], max_tokens=rng.randint(1, 30))
        drive.step()
        for request in drive.live():
            if rng.random() < 0.3:
                drive.scheduler.finish(request)
                aborted += 1
    for request in drive.live():
        drive.scheduler.finish(request)
    drive.scheduler.check_integrity()
    assert drive.cache.pool.num_held == 0
    normal = drive.add(20, max_tokens=5)
    drive.run()
    assert drive.outputs[normal.request_id] == continuation(range(1, 21), 5)


def test_sc_19_a_turn_that_follows_an_aborted_one_at_once_equals_a_fresh_run() -> None:
    rng = random.Random(3)
    drive = SchedulerDrive(num_blocks=40, block_size=4, budget=8)
    history = [1, 2, 3]
    for _ in range(300):
        turn = drive.add(history, max_tokens=30)
        for _ in range(rng.randint(0, 6)):
            drive.step()
        drive.scheduler.finish(turn)
        history = (history + turn.output_token_ids + [rng.randint(0, 49)])[-40:]
        following = drive.add(history, max_tokens=2)
        drive.run()
        assert drive.outputs[following.request_id] == continuation(history, 2)


@pytest.mark.parametrize("klass", ["interactive", "batch"])
def test_kv_10_blocks_come_back_without_any_message(klass: Klass) -> None:
    """A lost abort, for one: no block waits for anything but steps, and a request has at most `max_tokens` of them."""
    drive = SchedulerDrive(num_blocks=12, block_size=4, budget=8)
    forgotten = drive.add(20, max_tokens=25, klass=klass)
    waiting = drive.add([60] * 40, max_tokens=2, klass=klass)
    for _ in range(3 + 25 + 5 + 2):
        drive.step()
    assert waiting.request_id in drive.outputs
    assert len(drive.outputs[forgotten.request_id]) == 25
    assert drive.cache.pool.num_held == 0


def test_kv_09_ended_requests_leave_the_whole_pool_to_one() -> None:
    drive = SchedulerDrive(num_blocks=12, block_size=4, budget=64)
    for start in (0, 20, 40):
        drive.add([start + i for i in range(15)], max_tokens=1)
    drive.run()
    assert drive.cache.pool.num_cached > 0
    request = drive.add([9] * 46, max_tokens=2)
    drive.run(10)
    assert drive.outputs[request.request_id] == continuation([9] * 46, 2)
