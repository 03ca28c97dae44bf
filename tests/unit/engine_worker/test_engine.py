"""The engine's loop: ends, aborts, take-overs, stops, statistics, refusals."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine_worker.models.base import LoadedModel
from engine_worker.request import Request
from shared.errors import ContextLengthExceeded, InvalidRequest
from tests.support.engines import EngineRun, engine_for
from tests.support.requests import make_request


def solo(tiny: LoadedModel, *args: Any, **kwargs: Any) -> list[int]:
    """Output of the request alone in a fresh engine."""
    request = make_request(*args, **kwargs)
    run = EngineRun(engine_for(tiny))
    run.add(request)
    return run.finish().tokens(request)


def test_an_idle_engine_has_no_work_and_a_step_does_nothing(tiny: LoadedModel) -> None:
    engine = engine_for(tiny)
    assert not engine.has_work
    assert engine.step() == []
    assert engine.stats().steps == 0


def test_max_tokens_ends_with_length_on_the_last_token(tiny: LoadedModel) -> None:
    run = EngineRun(engine_for(tiny))
    request = make_request(7, 5)
    run.add(request)
    run.finish()
    assert [event.finish_reason for event in run.events[request.request_id]] == [None, None, None, None, "length"]
    assert run.end(request).token_id == request.output_token_ids[-1]
    assert run.end(request).stop_token_id is None


def test_take_overs_are_computed_before_what_waits(tiny: LoadedModel) -> None:
    run = EngineRun(engine_for(tiny, max_num_seqs=1))
    new, younger, older = (make_request(size, 3, arrival=place) for size, place in ((7, 0), (6, -1000), (5, -2000)))
    run.add(new, younger, older)
    run.finish()
    assert list(run.events) == [older.request_id, younger.request_id, new.request_id]


def test_a_stop_token_ends_with_stop_and_is_part_of_the_event(tiny: LoadedModel) -> None:
    free = solo(tiny, 7, 8)
    stop = free[3]
    assert stop not in free[:3]
    run = EngineRun(engine_for(tiny))
    request = make_request(7, 8, stop=[stop])
    run.add(request)
    run.finish()
    assert run.tokens(request) == free[:4]
    end = run.end(request)
    assert (end.finish_reason, end.token_id, end.stop_token_id) == ("stop", stop, stop)


def test_a_stop_token_at_the_last_position_is_a_stop(tiny: LoadedModel) -> None:
    free = solo(tiny, 7, 4)
    run = EngineRun(engine_for(tiny))
    request = make_request(7, 4, stop=[free[3]])
    run.add(request)
    assert run.finish().end(request).finish_reason == "stop"


def test_min_tokens_holds_stop_tokens_back(tiny: LoadedModel) -> None:
    run = EngineRun(engine_for(tiny))
    request = make_request(7, 20, stop=range(0, 320, 2), min_tokens=6)
    run.add(request)
    tokens = run.finish().tokens(request)
    assert all(token % 2 for token in tokens[:6])
    assert len(tokens) > 6


@pytest.mark.parametrize("logged", [1, 3, 7])
def test_a_take_over_continues_with_the_same_tokens(tiny: LoadedModel, logged: int) -> None:
    params: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "min_tokens": 6,
        "seed": 12345,
        "stop": range(100),
    }
    whole = solo(tiny, 20, 10, **params)
    assert len(whole) > logged
    run = EngineRun(engine_for(tiny))
    request = make_request(20, 10, output=whole[:logged], **params)
    run.add(request)
    assert run.finish().tokens(request) == whole[logged:]
    assert request.output_token_ids == whole


def test_a_take_over_with_nothing_left_to_draw_ends_at_once(tiny: LoadedModel) -> None:
    run = EngineRun(engine_for(tiny))
    full, stopped = make_request(5, 3, output=[9, 9, 9]), make_request(5, 9, output=[9, 4], stop=[4])
    run.add(full, stopped)
    run.step()
    assert (run.end(full).finish_reason, run.end(full).token_id) == ("length", None)
    assert (run.end(stopped).finish_reason, run.end(stopped).stop_token_id) == ("stop", 4)
    assert not run.engine.has_work


@pytest.mark.parametrize("steps_before", [0, 1, 4])
def test_an_abort_frees_blocks_at_the_next_step(tiny: LoadedModel, steps_before: int) -> None:
    run = EngineRun(engine_for(tiny, max_num_batched_tokens=16, enable_prefix_caching=False))
    request = make_request(40, 100)
    run.add(request)
    for _ in range(steps_before):
        run.step()
    run.engine.abort(request.request_id)
    run.step()
    assert run.end(request).finish_reason == "abort"
    assert run.engine.stats().blocks_used == 0
    assert not run.engine.has_work


def test_an_abort_can_carry_another_reason_and_comes_once(tiny: LoadedModel) -> None:
    run = EngineRun(engine_for(tiny))
    request = make_request(5, 100)
    run.add(request)
    run.step()
    for _ in range(3):
        run.engine.abort(request.request_id, "stop")
    run.engine.abort("never heard of")
    run.finish()
    assert run.end(request).finish_reason == "stop"
    assert run.end(request).stop_token_id is None


def test_sc_15_two_hundred_aborts_leave_nothing_and_harm_nobody(tiny: LoadedModel) -> None:
    engine = engine_for(tiny, num_blocks=64, max_num_seqs=6, max_num_batched_tokens=48)
    run = EngineRun(engine)
    survivor = make_request(30, 150)
    run.add(survivor)
    for number in range(200):
        request = make_request([number % 320] * (1 + number % 40), 1 + number % 30)
        run.add(request)
        for _ in range(number % 4):
            run.step()
        engine.abort(request.request_id)
    run.finish()
    assert run.tokens(survivor) == solo(tiny, 30, 150)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_sc_11_an_id_in_use_is_refused_until_its_request_has_ended(tiny: LoadedModel) -> None:
    run = EngineRun(engine_for(tiny))
    first = make_request(5, 6, request_id="same")
    run.add(first)
    with pytest.raises(InvalidRequest, match="in use"):
        run.add(make_request(5, request_id="same"))
    run.step()
    with pytest.raises(InvalidRequest, match="in use"):
        run.add(make_request(5, request_id="same"))
    run.finish()
    run.events.clear()
    again = make_request(5, 6, request_id="same")
    run.add(again)
    assert run.finish().tokens(again) == solo(tiny, 5, 6)


@pytest.mark.parametrize("over", [0, 1])
def test_sc_08_the_capacity_is_one_number_for_everyone(tiny: LoadedModel, over: int) -> None:
    engine = engine_for(tiny, num_blocks=4, block_size=16)
    assert engine.max_request_tokens() == 64
    run = EngineRun(engine)
    request = make_request(60, 4 + over)
    if over:
        with pytest.raises(ContextLengthExceeded, match="64 at most"):
            run.add(request)
        assert not engine.has_work
    else:
        run.add(request)
        assert len(run.finish().tokens(request)) == 4


def test_the_window_of_the_model_bounds_the_capacity(tiny: LoadedModel) -> None:
    assert engine_for(tiny, num_blocks=1000).max_request_tokens() == 512
    assert engine_for(tiny, num_blocks=1000, max_model_len=100).max_request_tokens() == 100


def test_events_carry_logprobs_when_asked_for(tiny: LoadedModel) -> None:
    run = EngineRun(engine_for(tiny))
    asked, silent = make_request(5, 3, logprobs=2), make_request(5, 3)
    run.add(asked, silent)
    run.finish()
    for event in run.events[asked.request_id]:
        assert event.logprobs is not None
        assert event.logprobs.top[0] == (event.token_id, event.logprobs.logprob)
        assert len(event.logprobs.top) == 2
    assert all(event.logprobs is None for event in run.events[silent.request_id])


def test_statistics_add_up(tiny: LoadedModel) -> None:
    engine = engine_for(tiny, block_size=16, max_num_batched_tokens=32)
    run = EngineRun(engine)
    assert engine.stats().last_step_end == 0.0
    run.add(make_request(40, 5))
    run.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.steps) == (1, 0, 3, 1)
    assert 0 < stats.last_step_start <= stats.last_step_end
    run.finish()
    run.add(make_request(40, 5))
    run.finish()
    stats = engine.stats()
    assert stats.counters == {
        "prompt_tokens": 80,
        "generation_tokens": 10,
        "computed_tokens": 44 + 12,
        "preemptions": 0,
        "cached_tokens": 32,
        "queried_tokens": 80,
    }
    assert stats.blocks_cached == 2
    assert stats.blocks_total == 256


def test_the_memory_setting_decides_the_number_of_blocks(tiny: LoadedModel) -> None:
    per_block = 16 * tiny.config.kv_bytes_per_token()
    engine = engine_for(tiny, num_blocks=None, kv_cache_memory=10 * per_block + 5)
    assert engine.stats().blocks_total == 10
    with pytest.raises(ValueError, match="kv_cache_memory"):
        engine_for(tiny, num_blocks=None, kv_cache_memory=per_block - 1)


def test_free_seats_count_batch_as_free_for_interactive(tiny: LoadedModel) -> None:
    engine = engine_for(tiny, max_num_seqs=3)
    run = EngineRun(engine)
    assert (engine.free_seats("interactive"), engine.free_seats("batch")) == (3, 3)
    run.add(*(make_request(5, 3, klass="batch") for _ in range(2)), make_request(5, 9), make_request(5, 3))
    assert (engine.free_seats("interactive"), engine.free_seats("batch")) == (1, -1)
    run.finish()
    assert (engine.free_seats("interactive"), engine.free_seats("batch")) == (3, 3)


def test_requests_may_come_and_go_from_other_threads(tiny: LoadedModel) -> None:
    engine = engine_for(tiny, max_num_batched_tokens=64)
    run = EngineRun(engine)
    requests: list[list[Request]] = [[make_request(3 + n, 4) for n in range(20)] for _ in range(4)]

    def client(mine: list[Request]) -> None:
        for number, request in enumerate(mine):
            engine.add(request)
            if number % 3 == 0:
                engine.abort(request.request_id)

    threads = [threading.Thread(target=client, args=(mine,)) for mine in requests]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.has_work:
        run.step()
    for thread in threads:
        thread.join()
    run.finish()
    assert sum(run.end(request).finish_reason is not None for mine in requests for request in mine) == 80
