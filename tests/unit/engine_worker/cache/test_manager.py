"""The cache manager: what a request is given, what it finds, what stays behind. Exact block ids."""

from __future__ import annotations

import pytest

from engine_worker.cache.manager import CacheManager
from engine_worker.request import Request
from tests.support.requests import make_request


def compute(cache: CacheManager, request: Request, upto: int | None = None) -> None:
    """As if steps had computed the request's known tokens up to `upto`."""
    before = request.num_computed_tokens
    request.num_computed_tokens = request.num_tokens if upto is None else upto
    cache.computed(request, before)


def begin(cache: CacheManager, request: Request, reserve: int = 0) -> int | None:
    found = None if cache.lacking(request, reserve) > 0 else cache.begin(request)
    request.num_computed_tokens = found or 0
    return found


def finished(cache: CacheManager, prompt: list[int]) -> None:
    """Leaves the full blocks of `prompt` cached."""
    request = make_request(prompt)
    begin(cache, request)
    compute(cache, request)
    cache.release(request)


def test_a_first_request_gets_fresh_blocks_for_all_it_knows() -> None:
    cache = CacheManager(8, 4)
    request = make_request(9, output=[50])
    assert begin(cache, request) == 0
    assert request.block_table == [0, 1, 2]


def test_full_blocks_of_a_running_request_are_shared() -> None:
    cache = CacheManager(8, 4)
    first, second = make_request(10), make_request(10)
    begin(cache, first)
    compute(cache, first)
    assert begin(cache, second) == 8
    assert second.block_table == [0, 1, 3]
    cache.check_integrity([first, second])


def test_blocks_not_computed_yet_are_not_found() -> None:
    cache = CacheManager(8, 4)
    first, second = make_request(10), make_request(10)
    begin(cache, first)
    compute(cache, first, upto=7)
    assert begin(cache, second) == 4
    assert second.block_table[0] == first.block_table[0]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
def test_sc_05_a_full_hit_leaves_the_last_block_to_compute(num_blocks: int) -> None:
    cache = CacheManager(16, 4)
    prompt = list(range(num_blocks * 4))
    finished(cache, prompt)
    assert begin(cache, make_request(prompt)) == (num_blocks - 1) * 4


def test_blocks_of_output_tokens_are_found_by_the_next_turn() -> None:
    cache = CacheManager(8, 4)
    first = make_request([1, 2, 3])
    begin(cache, first)
    compute(cache, first)
    for token in (4, 5, 6, 7, 8):
        first.output_token_ids.append(token)
        assert cache.grow(first)
        compute(cache, first)
    cache.release(first)
    assert begin(cache, make_request([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 8


def test_growth_takes_a_block_only_at_a_border_and_says_when_there_is_none() -> None:
    cache = CacheManager(2, 4)
    request = make_request(4)
    begin(cache, request)
    assert cache.grow(request)
    assert request.block_table == [0]
    request.output_token_ids += [9]
    assert cache.grow(request)
    assert request.block_table == [0, 1]
    request.output_token_ids += [9] * 4
    assert not cache.grow(request)
    assert request.block_table == [0, 1]


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    cache = CacheManager(4, 4)
    holder = make_request(9)
    begin(cache, holder)
    late = make_request([7] * 8)
    assert begin(cache, late) is None
    assert late.block_table == []
    cache.check_integrity([holder])


def test_reserved_blocks_stay_available() -> None:
    cache = CacheManager(4, 4)
    assert begin(cache, make_request(9), reserve=2) is None
    assert begin(cache, make_request(9), reserve=1) == 0


def test_hits_among_the_evictable_are_not_counted_as_room_twice() -> None:
    cache = CacheManager(3, 4)
    finished(cache, list(range(8)))
    # Two blocks are cached and one is free: 13 tokens would need 4 blocks, of which 2 are hits and only 1 is room.
    late = make_request([*range(8), 50, 51, 52, 53, 54])
    assert begin(cache, late) is None
    cache.check_integrity([])


def test_kv_08_release_is_idempotent() -> None:
    cache = CacheManager(4, 4)
    request = make_request(9)
    begin(cache, request)
    compute(cache, request)
    for _ in range(3):
        cache.release(request)
        cache.check_integrity([])
    assert (cache.pool.num_free, cache.pool.num_cached, cache.pool.num_held) == (2, 2, 0)


def test_kv_09_content_of_ended_requests_never_stands_in_the_way() -> None:
    cache = CacheManager(6, 4)
    for prompt in (list(range(12)), list(range(20, 32))):
        finished(cache, prompt)
    assert cache.pool.num_cached == 6
    whole = make_request(list(range(50, 74)))
    assert begin(cache, whole) == 0
    assert len(whole.block_table) == 6
    cache.check_integrity([whole])


def test_a_prefix_is_evicted_from_its_end() -> None:
    cache = CacheManager(4, 4)
    finished(cache, list(range(12)))
    other = make_request(list(range(50, 58)))
    begin(cache, other)
    assert begin(cache, make_request([*range(8), 99])) is None
    cache.release(other)
    assert begin(cache, make_request([*range(12), 99])) == 8


def test_kv_04_an_evicted_block_is_not_found_under_its_old_content() -> None:
    cache = CacheManager(2, 4)
    finished(cache, list(range(8)))
    finished(cache, list(range(50, 58)))
    late = make_request(list(range(8)))
    assert begin(cache, late) == 0
    cache.check_integrity([late])


def test_kv_03_salts_do_not_share() -> None:
    cache = CacheManager(16, 4)
    salted = make_request(9, salt="x")
    begin(cache, salted)
    compute(cache, salted)
    assert begin(cache, make_request(9)) == 0
    assert begin(cache, make_request(9, salt="y")) == 0
    assert begin(cache, make_request(9, salt="x")) == 8


def test_kv_03_a_salt_is_not_a_model_and_models_do_not_share() -> None:
    """Digests, because one process has one model: two of them must agree on nothing, wherever blocks may come from."""
    prompt = list(range(8))
    keys = [("", ""), ("x", ""), ("", "x"), ("x", "x"), ("y", "")]
    chains = [CacheManager(4, 4, model_key=model)._chain(make_request(prompt, salt=salt), 2) for model, salt in keys]
    assert len({prefix.digest for chain in chains for prefix in chain}) == 2 * len(keys)
    assert not any(a[-1].same_as(b[-1]) for i, a in enumerate(chains) for b in chains[:i])


def test_an_id_that_comes_again_is_hashed_anew() -> None:
    cache = CacheManager(16, 4)
    first, second = make_request(9, request_id="same"), make_request([7] * 9, request_id="same")
    begin(cache, first)
    compute(cache, first)
    cache.release(first)
    assert begin(cache, second) == 0
    compute(cache, second)
    cache.release(second)
    assert begin(cache, make_request([7] * 9)) == 8
    assert len(cache._chains) == 1, "nothing is kept of requests that ended"


def test_discarded_content_is_not_found_even_while_another_holds_it() -> None:
    cache = CacheManager(8, 4)
    broken, sharer = make_request(9), make_request(9)
    begin(cache, broken)
    compute(cache, broken)
    begin(cache, sharer)
    cache.release(broken, discard=True)
    late = make_request(9)
    assert begin(cache, late) == 0
    cache.check_integrity([sharer, late])
    cache.release(sharer)
    cache.check_integrity([late])


def test_the_same_content_computed_twice_is_indexed_once_and_both_are_given_back() -> None:
    cache = CacheManager(8, 4)
    first, second = make_request(8), make_request(8)
    begin(cache, first)
    begin(cache, second)
    compute(cache, first)
    compute(cache, second)
    cache.check_integrity([first, second])
    cache.release(first)
    cache.release(second)
    cache.check_integrity([])
    assert (cache.pool.num_free, cache.pool.num_cached) == (6, 2)


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    cache = CacheManager(8, 4, enable_prefix_caching=False)
    finished(cache, list(range(8)))
    assert cache.pool.num_free == 8
    assert begin(cache, make_request(list(range(8)))) == 0


def test_a_request_awaits_blocks_that_the_current_step_fills() -> None:
    cache = CacheManager(16, 4)
    first, twin, other = make_request(10), make_request(10), make_request([7] * 10)
    begin(cache, first)
    cache.announce(first, 10)
    assert cache.awaits_prefix(twin)
    assert not cache.awaits_prefix(other)
    compute(cache, first)
    cache.start_step()
    assert not cache.awaits_prefix(twin)
    assert begin(cache, twin) == 8


def test_requests_that_recompute_only_their_last_block_do_not_wait_for_each_other() -> None:
    cache = CacheManager(16, 4)
    finished(cache, list(range(8)))
    first = make_request(list(range(8)))
    begin(cache, first)
    cache.announce(first, 8)
    assert not cache.awaits_prefix(make_request(list(range(8))))
    assert not cache.awaits_prefix(make_request(list(range(9))))
