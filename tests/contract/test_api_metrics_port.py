"""/metrics on a port of its own: there, and no longer beside the API."""

from __future__ import annotations

import httpx

from tests.support.api_pod import running_pod
from tests.support.scripted_worker import ScriptedWorker, say_each
from tests.support.wait import eventually


async def test_metrics_can_have_a_port_of_their_own(redis_url: str) -> None:
    async with (
        ScriptedWorker(redis_url, lambda request: say_each(["Hi there"] * request.num_choices)),
        running_pod(redis_url, metrics_port=0, api_key=("sk-1",)) as pod,
    ):
        beside = pod.server.metrics_server
        assert beside is not None
        await eventually(lambda: beside.started, what="the second server started")
        port = beside.servers[0].sockets[0].getsockname()[1]
        key = {"Authorization": "Bearer sk-1"}
        answer = await pod.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "x", "user": "ann", "zap": 1}, headers=key
        )
        assert answer.status_code == 200
        assert answer.headers["x-ignored-params"] == "zap"
        assert (await pod.client.get("/metrics")).status_code == 401
        assert (await pod.client.get("/metrics", headers=key)).status_code == 404
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            shown = await client.get("/metrics")
            assert "vllm:request_success_total" in shown.text
            assert (await client.get("/v1/models")).status_code == 404
