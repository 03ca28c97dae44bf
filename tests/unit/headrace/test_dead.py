"""`headrace dead`, on letters that a real worker's queue wrote."""

from __future__ import annotations

import json

import pytest
from redis.asyncio import Redis

from headrace import dead
from shared.claims import ClaimQueue, Consumer
from shared.connections import blocking_client
from shared.keys import new_rid
from shared.messages import GenerateRequest
from shared.params import SamplingParams, StopConditions
from shared.queue import RequestQueue


async def bury(redis: Redis, redis_url: str, shard: int = 0) -> str:
    """Queues a request that a worker then gives up; its id."""
    request = GenerateRequest(
        new_rid(shard), "m", ((7, 8),), SamplingParams(), StopConditions(max_tokens=1), tenant="t"
    )
    await RequestQueue(redis).submit(request, max_waiting=10, max_waiting_tokens=100)
    blocking = blocking_client(redis_url)
    queue = ClaimQueue(redis, blocking, Consumer("w", "m", shard))
    await queue.ensure_group()
    [acquired] = await queue.acquire(await queue.read(1))
    await queue.bury(acquired.claim, "request_poisoned", "It ended two workers.")
    await blocking.aclose()
    return request.rid


async def listed(redis: Redis, capsys: pytest.CaptureFixture[str], shards: int = 2) -> list[str]:
    assert await dead.list_letters(redis, shards, True) == 0
    return [letter["request"] for letter in json.loads(capsys.readouterr().out)]


async def test_list_shows_letters_of_all_shards(
    redis: Redis, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rids = [await bury(redis, redis_url, shard) for shard in (0, 1)]
    assert sorted(await listed(redis, capsys)) == sorted(rids)
    assert await dead.list_letters(redis, 2, False) == 0
    table = capsys.readouterr().out
    assert all(rid in table for rid in rids)
    assert "request_poisoned" in table


async def test_an_empty_list_says_so(redis: Redis, capsys: pytest.CaptureFixture[str]) -> None:
    assert await dead.list_letters(redis, 1, False) == 0
    assert capsys.readouterr().out == "No dead letters.\n"


async def test_show_prints_the_whole_request(redis: Redis, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    rid = await bury(redis, redis_url)
    assert await dead.show(redis, rid) == 0
    letter = json.loads(capsys.readouterr().out)
    assert (letter["request"], letter["tenant"], letter["code"]) == (rid, "t", "request_poisoned")
    assert letter["body"]["prompts"] == [[7, 8]]


async def test_replay_queues_it_again_and_forgets_the_letter(
    redis: Redis, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rid = await bury(redis, redis_url)
    assert await dead.replay(redis, [rid]) == 0
    new = capsys.readouterr().out.split()[-1]
    state = await RequestQueue(redis).state(new)
    assert state is not None
    assert (state.state, state.request.prompts) == ("open", ((7, 8),))
    assert await listed(redis, capsys) == []


async def test_drop_forgets_it(redis: Redis, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    kept, dropped = await bury(redis, redis_url), await bury(redis, redis_url)
    assert await dead.drop(redis, [dropped]) == 0
    capsys.readouterr()
    assert await listed(redis, capsys) == [kept]


@pytest.mark.parametrize("rid", ["nonsense", new_rid(0)])
async def test_an_unknown_id_is_an_error(redis: Redis, capsys: pytest.CaptureFixture[str], rid: str) -> None:
    assert await dead.show(redis, rid) == await dead.replay(redis, [rid]) == await dead.drop(redis, [rid]) == 1
    assert capsys.readouterr().err.count(f"no dead letter {rid}") == 3
