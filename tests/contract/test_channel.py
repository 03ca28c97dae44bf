"""The subscriber: nothing is missed silently, one connection whatever the number of streams, closing never hangs."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from shared.channel import Feed, Resync, Subscriber
from shared.errors import RedisUnavailable
from tests.support.redis_server import RedisServer
from tests.support.wait import eventually


async def test_messages_published_after_entering_arrive_in_order(redis: Redis, redis_url: str) -> None:
    async with Subscriber(redis_url) as subscriber, subscriber.listen("a", 5) as feed:
        for i in range(100):
            await redis.publish("a", str(i))
        assert [await feed.get(5) for _ in range(100)] == [str(i).encode() for i in range(100)]
        assert await feed.get(0.01) is None


async def test_two_listeners_of_a_channel_get_everything_each(redis: Redis, redis_url: str) -> None:
    async with Subscriber(redis_url) as subscriber, subscriber.listen("a", 5) as one:
        async with subscriber.listen("a", 5) as two:
            await redis.publish("a", "x")
            assert (await one.get(5), await two.get(5)) == (b"x", b"x")
        await redis.publish("a", "y")
        assert await one.get(5) == b"y"


async def test_a_new_subscription_confirmation_is_a_resync(redis: Redis, redis_url: str) -> None:
    async with Subscriber(redis_url) as subscriber, subscriber.listen("a", 5) as feed:
        for round_number in range(5):
            await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            assert isinstance(await feed.get(5), Resync)
            await redis.publish("a", str(round_number))
            assert await feed.get(5) == str(round_number).encode()


async def test_rl_04_five_hundred_streams_use_one_connection(redis: Redis, redis_url: str) -> None:
    async def stream(subscriber: Subscriber, name: str, abort: bool) -> None:
        async with subscriber.listen(name, 30) as feed:
            if not abort:
                await redis.publish(name, name)
                assert await feed.get(30) == name.encode()

    async with Subscriber(redis_url) as subscriber:
        await asyncio.gather(*(stream(subscriber, f"c{i}", i % 2 == 0) for i in range(500)))
        listening = [client for client in await redis.client_list() if client["cmd"].endswith("subscribe")]
        assert len(listening) == 1

        async def none_left() -> bool:
            return await redis.pubsub_channels() == []

        await eventually(none_left)


async def test_a_channel_left_and_entered_again_misses_nothing(redis: Redis, redis_url: str) -> None:
    """The confirmation of an earlier SUBSCRIBE must not be taken for that of the later one."""
    async with Subscriber(redis_url) as subscriber:
        for i in range(200):
            early = asyncio.create_task(subscriber.listen("a", 5).__aenter__())
            for _ in range(i % 5):
                await asyncio.sleep(0)
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)
            async with subscriber.listen("a", 5) as feed:
                await redis.publish("a", str(i))
                assert await feed.get(5) == str(i).encode()


async def test_a_slow_reader_gets_a_resync_instead_of_endless_memory() -> None:
    feed = Feed(limit=4)
    for i in range(6):
        feed.put(str(i).encode())
    assert isinstance(await feed.get(1), Resync)
    assert await feed.get(1) == b"5"
    assert await feed.get(0) is None


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_what_a_feed_gives_is_complete_or_says_that_it_is_not(bursts: list[int], limit: int) -> None:
    """Oracle: between two Resyncs the messages are consecutive; after the last one nothing is missing."""

    async def run() -> None:
        feed, sent, got = Feed(limit), 0, []
        for burst in bursts:
            for _ in range(burst):
                feed.put(str(sent).encode())
                sent += 1
            got.append(await feed.get(0))
        while (item := await feed.get(0)) is not None:
            got.append(item)
        known = -1
        for item in got:
            if isinstance(item, Resync):
                known = None  # type: ignore[assignment]
            elif item is not None:
                assert known is None or int(item) == known + 1
                known = int(item)
        assert known is None or known == sent - 1

    asyncio.run(run())


async def test_listen_says_so_when_redis_is_away_and_goes_on_when_it_is_back(own_redis: RedisServer) -> None:
    async with Subscriber(own_redis.url) as subscriber:
        async with subscriber.listen("a", 5) as feed:
            own_redis.kill()
            with pytest.raises(RedisUnavailable):
                async with subscriber.listen("b", 0.2):
                    pass
            own_redis.start()
            assert isinstance(await feed.get(10), Resync)
        assert subscriber.connected


async def test_rl_05_closing_is_quick_whatever_the_connection_does(own_redis: RedisServer) -> None:
    subscriber = Subscriber(own_redis.url)
    async with subscriber.listen("a", 5):
        own_redis.freeze()
        try:
            began = time.monotonic()
            await subscriber.close()
            assert time.monotonic() - began < 5
        finally:
            own_redis.thaw()
    with pytest.raises(RuntimeError, match="closed"):
        async with subscriber.listen("b"):
            pass


async def test_a_silent_dead_connection_is_noticed(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing arrives and nothing fails (a frozen server, a cut cable): the ping finds out."""
    monkeypatch.setattr("shared.channel._PING_S", 0.1)
    monkeypatch.setattr("shared.channel._CONNECT_S", 0.2)
    async with Subscriber(own_redis.url) as subscriber, subscriber.listen("a", 5) as feed:
        own_redis.freeze()
        await eventually(lambda: not subscriber.connected)
        own_redis.thaw()
        assert isinstance(await feed.get(10), Resync)


async def test_a_wait_without_a_limit_is_not_ended_by_the_limit_of_an_earlier_one() -> None:
    feed = Feed()
    feed.put(b"first")
    assert await feed.get(0.05) == b"first"
    waiting = asyncio.create_task(feed.get(0.05))
    await asyncio.sleep(0)
    feed.put(b"second")
    assert await waiting == b"second"
    patient = asyncio.create_task(feed.get())
    assert await Feed().get(0.2) is None  # by now the earlier wait's time is over
    assert not patient.done()
    feed.put(b"third")
    assert await patient == b"third"
    assert await feed.get(0.01) is None


async def test_what_is_taken_directly_wakes_no_reader_and_counts_as_heard() -> None:
    feed, taken = Feed(), []
    feed.direct = lambda item: not item.startswith(b"!") and not taken.append(item)
    waiting = asyncio.create_task(feed.get(30))
    await asyncio.sleep(0)
    feed.put(b"one")
    feed.put(b"two")
    feed.put(b"!end")
    feed.put(b"behind it")  # in order: not taken while something waits for the reader
    assert await waiting == b"!end"
    assert await feed.get(1) == b"behind it"
    assert taken == [b"one", b"two"]
