"""EngineConfig refuses what cannot work, by name."""

from __future__ import annotations

import pytest

from engine_worker.config import EngineConfig


@pytest.mark.parametrize(
    "name", ["block_size", "kv_cache_memory", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_bad_value_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}, allowed is 1 or more"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_target_that_is_no_time_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match=f"target_itl_ms is {value}"):
        EngineConfig(target_itl_ms=value)


def test_memory_is_turned_into_whole_blocks() -> None:
    assert EngineConfig(kv_cache_memory=1000).count_blocks(300) == 3
    assert EngineConfig(kv_cache_memory=1000, num_blocks=7).count_blocks(300) == 7


def test_memory_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_memory"):
        EngineConfig(kv_cache_memory=299).count_blocks(300)


def test_no_more_requests_run_than_the_budget_has_tokens() -> None:
    assert EngineConfig(max_num_seqs=48, max_num_batched_tokens=16).max_running == 16


@pytest.mark.parametrize(
    ("budget", "seqs", "spare"), [(576, 64, 64), (143, 8, 0), (144, 8, 16), (512, 500, 0), (512, 512, 0)]
)
def test_a_ninth_of_the_budget_is_for_ends_of_prompts_unless_decodes_need_it(
    budget: int, seqs: int, spare: int
) -> None:
    assert EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget).spare_tokens == spare
