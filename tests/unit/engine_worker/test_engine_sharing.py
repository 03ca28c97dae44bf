"""Too little memory and shared prefixes: the same tokens as with plenty, and little or no work done twice."""

from __future__ import annotations

import random
import zlib

import pytest

from engine_worker.cache import prefix_index
from engine_worker.models.base import LoadedModel
from engine_worker.request import Request
from tests.support.engines import EngineRun, engine_for
from tests.support.requests import make_request
from tests.support.scheduler_drive import SchedulerDrive, continuation

BLOCK_SIZE = 16


def crowd(klass_of: str = "mixed") -> list[Request]:
    """48 requests, the same at every call; some sampled, every third of class batch."""
    rng = random.Random(4)
    return [
        make_request(
            [rng.randrange(320) for _ in range(rng.randint(8, 120))],
            rng.randint(20, 100),
            request_id=f"{number:02}",
            seed=number,
            temperature=number % 2 * 0.8,
            klass="batch" if number % 3 == 0 and klass_of == "mixed" else "interactive",
        )
        for number in range(48)
    ]


def blocks_for(requests: list[Request]) -> int:
    return sum(-(-(len(r.prompt_token_ids) + r.max_tokens) // BLOCK_SIZE) for r in requests)


@pytest.mark.parametrize("klass_of", ["mixed", "interactive"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_for_a_third_of_48_requests_gives_the_tokens_of_an_unlimited_one(
    tiny: LoadedModel, klass_of: str, caching: bool
) -> None:
    ample, scarce = crowd(klass_of), crowd(klass_of)
    engines = [
        engine_for(tiny, num_blocks=blocks, max_num_seqs=48, max_num_batched_tokens=256, enable_prefix_caching=caching)
        for blocks in (blocks_for(ample), blocks_for(scarce) // 3)
    ]
    for engine, requests in zip(engines, (ample, scarce), strict=True):
        run = EngineRun(engine)
        run.add(*requests)
        run.finish()
    assert [r.output_token_ids for r in scarce] == [r.output_token_ids for r in ample]
    least = sum(len(r.prompt_token_ids) + r.max_tokens - 1 for r in scarce)
    assert engines[0].stats().counters["computed_tokens"] <= least
    assert engines[1].stats().counters["computed_tokens"] <= 1.6 * least


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("budget", [64, 512, 2048])
def test_a_prefix_of_1024_tokens_shared_by_32_requests_is_computed_once(together: bool, budget: int) -> None:
    rng = random.Random(5)
    prefix = [rng.randrange(50) for _ in range(1024)]
    drive = SchedulerDrive(num_blocks=400, block_size=BLOCK_SIZE, max_num_seqs=32, budget=budget)
    requests = []
    for number in range(32):
        requests.append(drive.add([*prefix, number, *(rng.randrange(50) for _ in range(number % 9))], max_tokens=1))
        if not together:
            drive.step()
    drive.run()
    ideal = len(prefix) + sum(len(r.prompt_token_ids) - len(prefix) for r in requests)
    assert drive.computed_tokens <= 1.05 * ideal
    assert all(drive.outputs[r.request_id] == continuation(r.prompt_token_ids, 1) for r in requests)


def test_a_prompt_that_comes_several_times_at_once_is_computed_once(tiny: LoadedModel) -> None:
    engine = engine_for(tiny)
    run = EngineRun(engine)
    requests = [make_request(80, 4, seed=seed, temperature=1.0) for seed in range(8)]
    run.add(*requests)
    run.finish()
    # Five blocks; the last must be computed again, because its logits are needed.
    assert engine.stats().counters["computed_tokens"] == 80 + 7 * 16 + 8 * 3
    assert [run.end(r).num_cached_tokens for r in requests] == [0, *[64] * 7]


@pytest.mark.parametrize("values", [1, 5])
def test_hashes_that_collide_all_the_time_change_no_token(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, values: int
) -> None:
    """Prompts with common beginnings, other salts, a pool that preempts: only hits may be lost."""
    answers = []
    for hashes in (None, values):
        if hashes is not None:
            monkeypatch.setattr(prefix_index, "_digest", lambda data: bytes([zlib.crc32(data) % values]))
        run = EngineRun(engine_for(tiny, num_blocks=40, max_num_batched_tokens=64, enable_prefix_caching=bool(hashes)))
        requests = [
            make_request([*range(20 * (i % 3)), *range(i, i + 30)], 12, seed=i, temperature=0.7, salt="x" * (i % 2))
            for i in range(24)
        ]
        run.add(*requests)
        run.finish()
        answers.append([request.output_token_ids for request in requests])
    assert answers[0] == answers[1]
