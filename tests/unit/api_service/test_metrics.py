"""Metrics: names that dashboards read, zero when workers say so, and harmless whatever happens."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_service.metrics import Metrics
from api_service.registry_view import Snapshot
from shared.histogram import SecondsHistogram
from shared.messages import WorkerCard
from shared.queue import Depth
from tests.support.scripted_worker import model_card


def samples(metrics: Metrics) -> dict[str, float]:
    """ "name{label}" -> value, labels without their names."""
    return {
        f"{sample.name}{{{','.join(v for _, v in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_gauges_are_what_the_workers_say_now() -> None:
    busy = WorkerCard("w1", "tiny", running=3, waiting=1, kv_blocks_used=25, kv_blocks_total=100, last_step_age_ms=40)
    view = Snapshot({"tiny": model_card()}, (busy,), {"tiny": Depth(5, 3, 70)}, redis_ok=True)
    values = samples(Metrics(lambda: view))
    assert values["vllm:num_requests_running{tiny}"] == 3
    assert values["vllm:num_requests_waiting{tiny}"] == 6
    assert values["vllm:kv_cache_usage_perc{tiny}"] == 0.25
    assert values["headrace_queue_tokens{tiny}"] == 70
    assert values["headrace_step_age_seconds{tiny,w1}"] == 0.04
    assert values["headrace_workers{tiny,ready}"] == 1


def test_abt_08_reasons_add_up_to_the_histogram() -> None:
    metrics = Metrics(Snapshot)
    for reason in ("stop", "length", "abort", "abort"):
        metrics.ended("tiny", reason, 1.0)
    values = samples(metrics)
    assert values["headrace_requests_total{abort,tiny}"] == values["vllm:request_success_total{abort,tiny}"] == 2
    assert values["vllm:e2e_request_latency_seconds_count{tiny}"] == 4


def test_ops_06_a_metric_that_fails_breaks_nothing() -> None:
    metrics = Metrics(Snapshot)
    metrics.first_token("tiny", math.nan)
    metrics._ended = None  # type: ignore[assignment]
    metrics.ended("tiny", "stop", 1.0)
    bad = WorkerCard("w", "tiny", counters={"generation_tokens": -5.0, "prompt_tokens": math.nan, "preemptions": 2.0})
    values = samples(Metrics(lambda: Snapshot(workers=(bad,))))
    assert values["headrace_preemptions_total{tiny,w}"] == values["vllm:num_preemptions_total{tiny,w}"] == 2
    assert not any("generation_tokens" in name for name in values)


def test_distributions_of_workers_are_histograms() -> None:
    ages = SecondsHistogram()
    for seconds in (-1.0, 0.002, 0.002, 7.0, 1000.0):
        ages.observe(seconds)
    cards = (
        WorkerCard("w", "tiny", histograms={"queue_age_seconds": ages.values()}),
        WorkerCard("older", "tiny", histograms={"queue_age_seconds": (1.0, 2.0)}),
    )
    values = samples(Metrics(lambda: Snapshot(workers=cards)))
    found = {name.split("{")[1]: value for name, value in values.items() if "queue_age_seconds_bucket" in name}
    assert found["0.001,tiny,w}"] == 1
    assert found["0.0025,tiny,w}"] == found["5.0,tiny,w}"] == 3
    assert found["10.0,tiny,w}"] == 4
    assert found["+Inf,tiny,w}"] == values["headrace_queue_age_seconds_count{tiny,w}"] == 5
    assert values["headrace_queue_age_seconds_sum{tiny,w}"] == pytest.approx(1007.004)
    assert not any("older" in name for name in found)


def test_streams_that_the_pod_ended_are_counted_by_reason() -> None:
    metrics = Metrics(Snapshot)
    metrics.cut("drain")
    assert samples(metrics)["headrace_streams_cut_total{drain}"] == 1
