"""A pod that was started by hand says where it can be reached, before any worker is there."""

from __future__ import annotations

from structlog.testing import capture_logs

from tests.support.api_pod import running_pod


async def test_a_pod_says_once_where_it_listens(redis_url: str) -> None:
    with capture_logs() as lines:
        async with running_pod(redis_url, wait=False, metrics_port=0) as pod:
            pass
    said = [line["base_url"] for line in lines if line["event"] == "listening"]
    assert said == [f"{pod.url}/v1"]
