"""What a worker's engine is like before its first request."""

from __future__ import annotations

from engine_worker.engine import Engine
from engine_worker.loading import make_engine
from engine_worker.models.base import LoadedModel
from engine_worker.settings import WorkerSettings
from tests.support.requests import make_request


class SlowMachine:
    """A clock by which a step takes a millisecond for each of its tokens, and five more."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._warm_up = 0.0

    def __call__(self) -> float:
        if self.engine is None:  # its first request runs while it is made
            self._warm_up += 0.003
            return self._warm_up
        stats = self.engine.stats()
        return self._warm_up + 0.005 * stats.steps + 0.001 * stats.counters["computed_tokens"]


def test_batch_work_that_comes_first_is_not_kept_short_because_of_the_warm_up(tiny: LoadedModel) -> None:
    clock = SlowMachine()
    settings = WorkerSettings(redis_url="redis://127.0.0.1:1", kv_cache_memory=1 << 22, max_num_seqs=8)
    engine = make_engine(settings, loaded=tiny, clock=clock).engine
    assert isinstance(engine, Engine)
    clock.engine = engine
    for number in range(8):
        engine.add(make_request([number] * 40, 20, klass="batch"))
    sizes = []
    while engine.has_work:
        before = engine.stats().counters["computed_tokens"]
        engine.step()
        sizes.append(engine.stats().counters["computed_tokens"] - before)
    # Steps of 25 ms would hold 20 tokens: prompts of 320 would take as many steps as the answers.
    assert max(sizes) >= 80
    assert len(sizes) <= 30
