"""/metrics: what this pod counted, and what the workers' cards say, under headrace_* and vLLM's names.

In: events of requests and the registry snapshot. Out: Prometheus text. Counting must never break a request, so every
public method swallows its own failures, once, in one decorator, and logs them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Concatenate, ParamSpec

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from api_service.registry_view import Snapshot
from shared.histogram import BOUNDS, SecondsHistogram

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_VLLM_COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens",
    "generation_tokens": "vllm:generation_tokens",
    "preemptions": "vllm:num_preemptions",
    "cached_tokens": "vllm:prefix_cache_hits",
    "queried_tokens": "vllm:prefix_cache_queries",
}
"""Totals of a worker's card -> vLLM's name of the same."""
_P = ParamSpec("_P")
log = structlog.get_logger(__name__)

# vLLM's buckets, so that its dashboards keep working.
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


_Method = Callable[Concatenate["Metrics", _P], None]


def _harmless(method: _Method[_P]) -> _Method[_P]:
    @functools.wraps(method)
    def guarded(self: Metrics, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a metric does wrong, the request it counts goes on
            log.warning("a metric could not be counted", metric=method.__name__, error=repr(error))

    return guarded


class Metrics:
    """One per app, with a registry of its own. `snapshot` gives the registry view when /metrics is read."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self.registry = CollectorRegistry()
        name, reason, registry = ["model_name"], ["model_name", "finished_reason"], self.registry
        self._ended = Counter("headrace_requests", "Accepted requests by how they ended.", reason, registry=registry)
        self._success = Counter("vllm:request_success", "The same under vLLM's name.", reason, registry=registry)
        self._refused = Counter("headrace_refusals", "Answers with an error status.", ["code"], registry=registry)
        self._gaps = Counter("headrace_relay_gaps", "Gaps in a channel, filled from the log.", registry=registry)
        self._restored = Counter("headrace_restores", "Requests queued again after Redis lost them.", registry=registry)
        self._resumed = Counter("headrace_resumes", "Streams continued with a cursor.", registry=registry)
        self._cut = Counter("headrace_streams_cut", "Streams this pod ended early.", ["reason"], registry=registry)
        self._active = Gauge("headrace_pod_requests", "Requests this pod carries now.", registry=registry)
        self._tenants_file = Gauge(
            "headrace_tenants_file_usable", "0 while the rules of an earlier file hold.", registry=registry
        )
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Until the first token.", name, buckets=_TTFT, registry=registry
        )
        self._itl: dict[str, SecondsHistogram] = {}
        """By model. The library's own takes several locks a value, and this one is counted for every token."""
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds", "Whole requests.", name, buckets=_E2E, registry=registry
        )
        self.registry.register(_BetweenTokens(self._itl))
        self.registry.register(_Cluster(snapshot))

    @_harmless
    def active(self, count: int) -> None:
        self._active.set(count)

    @_harmless
    def tenants_file(self, usable: bool) -> None:
        self._tenants_file.set(usable)

    @_harmless
    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    @_harmless
    def ended(self, model: str, reason: str, seconds: float) -> None:
        """Once for every request this pod got accepted."""
        self._ended.labels(model, reason).inc()
        self._success.labels(model, reason).inc()
        self._e2e.labels(model).observe(seconds)

    @_harmless
    def first_token(self, model: str, seconds: float) -> None:
        self._ttft.labels(model).observe(seconds)

    @_harmless
    def next_token(self, model: str, seconds: float) -> None:
        series = self._itl.get(model)
        if series is None:
            series = self._itl[model] = SecondsHistogram(_ITL)
        series.observe(seconds)

    @_harmless
    def gap(self) -> None:
        self._gaps.inc()

    @_harmless
    def cut(self, reason: str) -> None:
        """A stream was ended with an error that says how to go on: "drain" or "outage"."""
        self._cut.labels(reason).inc()

    @_harmless
    def restored(self) -> None:
        self._restored.inc()

    @_harmless
    def resumed(self) -> None:
        self._resumed.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _BetweenTokens(Collector):
    """Times between two tokens of a stream, by model."""

    def __init__(self, itl: Mapping[str, SecondsHistogram]) -> None:
        self._itl = itl

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Between tokens.", labels=["model_name"])
        for model, series in self._itl.items():
            family.add_metric([model], *_prometheus(_ITL, series.values()))
        yield family


class _Cluster(Collector):
    """Gauges and counters of the whole service, read from the workers' heartbeats at scrape time: never stale for long,
    and zero when the workers say so."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        view = self._snapshot()
        workers = GaugeMetricFamily("headrace_workers", "Workers by state.", labels=["model_name", "state"])
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences in the batch.", labels=["model_name"])
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests in the queue.", labels=["model_name"])
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used share of the KV cache.", labels=["model_name"])
        age = GaugeMetricFamily("headrace_step_age_seconds", "Since the last step.", labels=["model_name", "worker"])
        depth = GaugeMetricFamily("headrace_queue_tokens", "Prompt tokens in the queue.", labels=["model_name"])
        classes = GaugeMetricFamily(
            "headrace_queue_requests", "Waiting requests by class.", labels=["model_name", "class"]
        )
        for name in sorted({*view.models, *(card.model for card in view.workers)}):
            cards = [card for card in view.workers if card.model == name]
            queued = view.depths.get(name)
            running.add_metric([name], sum(card.running for card in cards))
            waiting.add_metric([name], sum(card.waiting for card in cards) + (queued.waiting if queued else 0))
            total = sum(card.kv_blocks_total for card in cards)
            usage.add_metric([name], sum(card.kv_blocks_used for card in cards) / total if total else 0.0)
            depth.add_metric([name], queued.waiting_tokens if queued else 0)
            batch = queued.waiting_batch if queued else 0
            classes.add_metric([name, "interactive"], (queued.waiting if queued else 0) - batch)
            classes.add_metric([name, "batch"], batch)
            for state in ("loading", "ready", "draining"):
                workers.add_metric([name, state], sum(card.state == state for card in cards))
            for card in cards:
                age.add_metric([name, card.worker_id], card.last_step_age_ms / 1000)
        yield from (workers, running, waiting, usage, age, depth, classes)
        yield from _tenants(view)
        yield from _counters(view)
        yield from _histograms(view)


def _tenants(view: Snapshot) -> Iterator[Metric]:
    """A few tenants a model, those that got or want most: the number of series does not grow with theirs."""
    labels = ["model_name", "tenant"]
    served = GaugeMetricFamily("headrace_tenant_served_tokens", "Tokens that a tenant was served.", labels=labels)
    waiting = GaugeMetricFamily("headrace_tenant_waiting", "Waiting requests of a tenant.", labels=labels)
    for name, uses in view.tenants.items():
        for use in uses:
            served.add_metric([name, use.share or "default"], use.served_tokens)
            waiting.add_metric([name, use.share or "default"], use.waiting)
    yield from (served, waiting)


def _counters(view: Snapshot) -> Iterator[Metric]:
    """The workers' own totals, one series a worker, and those that vLLM has under its names too."""
    names = sorted({name for card in view.workers for name in card.counters if name.replace("_", "").isalnum()})
    for name in names:
        for shown in filter(None, (f"headrace_{name}", _VLLM_COUNTERS.get(name))):
            family = CounterMetricFamily(shown, f"{name} of each worker.", labels=["model_name", "worker"])
            for card in view.workers:
                value = card.counters.get(name, 0.0)
                if math.isfinite(value) and value >= 0:
                    family.add_metric([card.model, card.worker_id], value)
            yield family


def _histograms(view: Snapshot) -> Iterator[Metric]:
    """The workers' distributions; one of another version, with other buckets, is left out."""
    for name in sorted({name for card in view.workers for name in card.histograms if name.replace("_", "").isalnum()}):
        family = HistogramMetricFamily(f"headrace_{name}", f"{name} of each worker.", labels=["model_name", "worker"])
        for card in view.workers:
            values = card.histograms.get(name, ())
            if len(values) == len(BOUNDS) + 2 and all(math.isfinite(value) and value >= 0 for value in values):
                family.add_metric([card.model, card.worker_id], *_prometheus(BOUNDS, values))
        yield family


def _prometheus(bounds: Sequence[float], values: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """Buckets, each with those below it, and the sum, from what `SecondsHistogram.values` gives."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(names, itertools.accumulate(values[:-1]), strict=True)), values[-1]
