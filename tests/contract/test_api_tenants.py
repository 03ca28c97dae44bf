"""Tenants, limits and classes as a client meets them: bodies, statuses, headers."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from redis.asyncio import Redis

from shared import keys
from shared.limits import key_id
from shared.queue import RequestQueue
from tests.support.api_pod import chunks_of, running_pod
from tests.support.scripted_worker import ScriptedWorker, say
from tests.support.wait import eventually


async def test_a_limited_key_gets_openais_refusal_and_headers(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[tenants.team]\nkeys = ["{key_id("one")}"]\nrequests_per_minute = 2\ntokens_per_minute = 100000\n'
    )
    async with (
        ScriptedWorker(redis_url, lambda _: say("Hello")),
        running_pod(redis_url, api_key="one,two", tenants=path) as pod,
    ):
        client = openai.AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="one", max_retries=0)
        messages = [{"role": "user", "content": "Hi"}]
        first = await client.chat.completions.with_raw_response.create(model="tiny", messages=messages)  # type: ignore[arg-type]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 100_000
        await client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]

        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]

        assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "requests")
        headers = refused.value.response.headers
        assert 20 <= int(headers["retry-after"]) <= 30
        assert 20_000 <= int(headers["retry-after-ms"]) <= 30_000
        assert headers["x-ratelimit-remaining-requests"] == "0"
        other = client.with_options(api_key="two")
        response = await other.chat.completions.with_raw_response.create(model="tiny", messages=messages)  # type: ignore[arg-type]
        assert "x-ratelimit-limit-requests" not in response.headers
        await client.close()


async def test_without_keys_the_user_field_tells_tenants_apart(redis_url: str, redis: Redis) -> None:
    async with ScriptedWorker(redis_url, lambda _: say("Hello")) as worker, running_pod(redis_url) as pod:
        for user in ("alice", "two words", None):
            response = await pod.chat(user=user)
            assert response.status_code == 200
            assert "x-ignored-params" not in response.headers
        shares = [request.share for request in worker.requests]
        assert shares[0] == "user:alice"
        assert shares[1].startswith("user:")
        assert shares[2] == "default"

        async def all_told() -> bool:
            return {use.share for use in await RequestQueue(redis).tenants("tiny")} == set(shares)

        await eventually(all_told)
        metrics = (await pod.client.get("/metrics")).text
        assert 'headrace_queue_requests{class="batch",model_name="tiny"} 0.0' in metrics

        async def shown() -> bool:
            return 'tenant="user:alice"' in (await pod.client.get("/metrics")).text

        await eventually(shown)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "klass", "told"), [("flex", "batch", "flex"), ("auto", "interactive", "default")])
async def test_flex_is_batch_work(
    redis_url: str, redis: Redis, stream: bool, asked: str, klass: str, told: str
) -> None:
    async with ScriptedWorker(redis_url, lambda _: say("Hello")) as worker, running_pod(redis_url) as pod:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "service_tier": asked}
        if stream:
            chunks = chunks_of(await pod.stream("/v1/chat/completions", {**body, "stream": True}))
            assert {chunk["service_tier"] for chunk in chunks} == {told}
        else:
            answer = (await pod.post("/v1/chat/completions", body)).json()
            assert (answer["service_tier"], answer["choices"][0]["message"]["content"]) == (told, "Hello")
        assert [request.klass for request in worker.requests] == [klass]
        assert await redis.exists(keys.served_key(0, "tiny", klass))


async def test_an_unknown_tier_is_refused(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, lambda _: say("Hello")), running_pod(redis_url) as pod:
        response = await pod.chat(service_tier="priority")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "service_tier")
        assert "service_tier" not in (await pod.chat()).json()


async def test_a_limit_that_is_changed_holds_for_the_next_request(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[default]\nrequests_per_minute = 1000\n")
    async with ScriptedWorker(redis_url, lambda _: say("Hello")), running_pod(redis_url, tenants=path) as pod:
        assert (await pod.chat()).headers["x-ratelimit-limit-requests"] == "1000"
        path.write_text("[default]\nrequests_per_minute = 2000\n")

        async def holds() -> bool:
            return (await pod.chat()).headers["x-ratelimit-limit-requests"] == "2000"

        await eventually(holds, interval=0.2)
        path.write_text("[default\n")

        async def told() -> bool:
            return "headrace_tenants_file_usable 0.0" in (await pod.client.get("/metrics")).text

        await eventually(told, interval=0.2)
        assert (await pod.chat()).headers["x-ratelimit-limit-requests"] == "2000"
