"""Commands over one connection: replies go to whoever asked, a lost connection loses no command, none waits long."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as TooLate

from shared.connections import blocking_client, command_client, together
from shared.scripts import DEPTH
from shared.wire import CommandLine
from tests.support.redis_server import RedisServer
from tests.support.wait import eventually


def line_to(url: str, *, limit_s: int | None = 5, once: bool = False) -> CommandLine:
    return CommandLine(command_client(url).connection_pool, limit_s=limit_s, once=once)


async def test_many_askers_share_one_connection_and_get_their_own_replies(redis: Redis, redis_url: str) -> None:
    line = line_to(redis_url)
    before = len(await redis.client_list())

    replies = await asyncio.gather(*(line.ask("ECHO", f"word {i}") for i in range(300)))

    assert replies == [f"word {i}".encode() for i in range(300)]
    assert len(await redis.client_list()) == before + 1
    line.close()


async def test_who_stops_waiting_takes_nobody_elses_reply(redis_url: str) -> None:
    line = line_to(redis_url)
    await line.ask("PING")
    asking = [asyncio.create_task(line.ask("ECHO", str(i))) for i in range(20)]
    await asyncio.sleep(0)
    for task in asking[::2]:
        task.cancel()

    replies = await asyncio.gather(*asking, return_exceptions=True)

    assert replies[1::2] == [str(i).encode() for i in range(1, 20, 2)]
    assert all(isinstance(reply, asyncio.CancelledError) for reply in replies[::2])
    assert await line.ask("ECHO", "after") == b"after"
    line.close()


async def test_an_error_reply_is_raised_as_redis_py_does(redis_url: str) -> None:
    line = line_to(redis_url)
    with pytest.raises(NoScriptError):
        await line.ask("EVALSHA", "0" * 40, 0)
    with pytest.raises(ResponseError, match="unknown command"):
        await line.ask("NO-SUCH-COMMAND")
    assert await line.ask("PING") == b"PONG"
    line.close()


async def test_a_command_whose_connection_is_lost_is_sent_again(own_redis: RedisServer) -> None:
    line, other = line_to(own_redis.url), command_client(own_redis.url)
    mine = await line.ask("CLIENT", "ID")
    own_redis.freeze()
    asking = asyncio.create_task(line.ask("INCR", "a"))
    await asyncio.sleep(0)
    own_redis.thaw()
    assert await asking == 1
    await other.client_kill_filter(_id=mine)
    assert await line.ask("INCR", "a") == 2
    assert await line.ask("CLIENT", "ID") != mine
    await other.aclose()
    line.close()


async def test_a_server_that_says_nothing_is_given_up(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.wire._TICK_S", 0.02)
    line = line_to(own_redis.url, limit_s=2, once=True)
    await line.ask("PING")
    own_redis.freeze()
    with pytest.raises(TooLate):
        await line.ask("PING")
    own_redis.thaw()
    assert await line.ask("PING") == b"PONG"
    line.close()


async def test_a_server_that_ends_is_a_lost_connection(own_redis: RedisServer) -> None:
    line = line_to(own_redis.url, once=True)
    await line.ask("PING")
    waiting = asyncio.create_task(line.ask("BLPOP", "nothing", 0))
    await asyncio.sleep(0)
    own_redis.kill()
    with pytest.raises(ConnectionLost):
        await waiting
    line.close()


async def test_scripts_of_a_client_go_over_its_line_and_other_commands_do_not(redis: Redis, redis_url: str) -> None:
    client = command_client(redis_url)
    names = ["{q00}:a", "{q00}:b", "{q00}:c", "{q00}:d"]
    await asyncio.gather(*(DEPTH(client, names, []) for _ in range(50)))
    scripts = [one for one in await redis.client_list() if one["cmd"].startswith("eval")]
    assert len(scripts) == 1
    await client.ping()
    await client.aclose()


async def test_a_cancelled_blocking_read_ends_with_its_connection(redis: Redis, redis_url: str) -> None:
    """Or its element would go to a connection that nobody reads."""
    client = blocking_client(redis_url)
    waiting = asyncio.create_task(client.blpop(["bell"], timeout=30))

    async def blocked() -> bool:
        return any(one["cmd"] == "blpop" for one in await redis.client_list())

    await eventually(blocked)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    async def gone() -> bool:
        return not await blocked()

    await eventually(gone)
    await redis.rpush("bell", 1)
    assert await client.blpop(["bell"], timeout=5) == (b"bell", b"1")
    await client.aclose()


async def test_commands_sent_together_are_answered_in_order_and_their_error_is_raised(
    redis: Redis, redis_url: str
) -> None:
    client = command_client(redis_url)
    for asked in (client, redis):  # over a line, and by redis-py's own pipeline
        replies = await together(asked, ("SET", "hr:x", "1", "PX", 60_000), ("GET", "hr:x"), ("SADD", "hr:x:s", "a"))
        assert replies[1:] == [b"1", 1]
        with pytest.raises(ResponseError):
            await together(asked, ("GET", "hr:x"), ("SADD", "hr:x", "not a set"), ("GET", "hr:x"))
        await redis.delete("hr:x", "hr:x:s")
    await client.aclose()
