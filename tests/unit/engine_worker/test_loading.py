"""What a worker's engine is like before its first request."""

from __future__ import annotations

from engine_worker.engine import Engine
from engine_worker.loading import make_engine
from engine_worker.models.base import LoadedModel
from engine_worker.settings import WorkerSettings
from tests.support.requests import make_request


def test_batch_work_that_comes_first_is_not_kept_short_because_of_the_warm_up(tiny: LoadedModel) -> None:
    settings = WorkerSettings(redis_url="redis://127.0.0.1:1", kv_cache_memory=1 << 22, max_num_seqs=8)
    engine = make_engine(settings, loaded=tiny).engine
    assert isinstance(engine, Engine)
    for number in range(8):
        engine.add(make_request([number] * 40, 20, klass="batch"))
    sizes = []
    while engine.has_work:
        before = engine.stats().counters["computed_tokens"]
        engine.step()
        size = engine.stats().counters["computed_tokens"] - before
        sizes.append(size)
        engine.took(0.005 + 0.001 * size)
    # Steps of 25 ms would hold 20 tokens: prompts of 320 would take as many steps as the answers.
    assert max(sizes) >= 80
    assert len(sizes) <= 30
