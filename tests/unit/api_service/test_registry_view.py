"""When a pod looks into the registry again: soon where somebody waits for a worker that is about to serve."""

from __future__ import annotations

import pytest

from api_service.registry_view import EAGER_REFRESH_S, LOADING_REFRESH_S, REFRESH_S, STEP_LIMIT_MS, Snapshot, pause_s
from shared.messages import ModelCard, WorkerCard

CARD = ModelCard("tiny", 0, 64, 64, 16, (), "")
MODELS = {CARD.name: CARD}


@pytest.mark.parametrize(
    ("state", "models", "expected"),
    [
        ("ready", MODELS, REFRESH_S),
        ("ready", {}, LOADING_REFRESH_S),  # a worker's card is written before its model's
        ("loading", {}, LOADING_REFRESH_S),
        ("loading", MODELS, LOADING_REFRESH_S),  # the model of one that died
        ("draining", MODELS, EAGER_REFRESH_S),
        (None, {}, EAGER_REFRESH_S),
    ],
)
def test_the_pause_is_short_while_a_worker_is_about_to_serve(
    state: str | None, models: dict[str, ModelCard], expected: float
) -> None:
    workers = (WorkerCard("w", CARD.name, state=state),) if state else ()
    assert pause_s(Snapshot(models, workers, redis_ok=True)) == expected


def test_a_worker_that_hangs_is_not_about_to_serve() -> None:
    hung = WorkerCard("w", CARD.name, running=1, last_step_age_ms=STEP_LIMIT_MS + 1)
    assert pause_s(Snapshot(MODELS, (hung,), redis_ok=True)) == EAGER_REFRESH_S
