"""What a committed record costs Redis: python -m benchmarks.commit_cost [--records 1 16 64] [--calls 500]

In: a Redis of its own with AOF, or that of --redis-url; every request is heard by one subscriber. Out: a table of
server time by `INFO commandstats`, without client and network: the median call, over its records (and the lowest tenth,
which a busy machine bothers least). Limit: 25 us a token record.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from headrace.contact import ping
from headrace.embedded import EmbeddedServer
from shared.channel import Subscriber
from shared.claims import Acquired, ClaimQueue, Commit, Consumer, ReplyKind
from shared.connections import blocking_client, check_server, command_client
from shared.keys import channel_name, new_rid
from shared.messages import Delta, End, GenerateRequest, Record, Usage, encode
from shared.params import SamplingParams, StopConditions
from shared.queue import RequestQueue

LIMIT_US = 25.0
START_S = 10.0
MODEL = "benchmark"


@asynccontextmanager
async def own_server() -> AsyncIterator[str]:
    """The server that `headrace serve` would start; its URL."""
    server = EmbeddedServer.prepare(None)
    process = await asyncio.create_subprocess_exec(*server.command())
    try:
        if (trouble := await ping(server.url, START_S)) is not None:
            raise SystemExit(f"the benchmark's Redis did not start: {trouble}")
        yield server.url
    finally:
        process.terminate()
        await process.wait()
        server.remove()


async def script_us(redis: Redis) -> int:
    """Microseconds spent in scripts, with all they call, since the server started."""
    stats: Any = await redis.info("commandstats")
    return sum(int(stats[name]["usec"]) for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats)


class Bench:
    """Requests that run, as a worker holds them."""

    def __init__(self, redis: Redis, blocking: Redis, subscriber: Subscriber) -> None:
        self._redis = redis
        self._queue = RequestQueue(redis)
        self._subscriber = subscriber
        self._worker = ClaimQueue(redis, blocking, Consumer("benchmark", MODEL))

    async def begin(self, count: int, stack: AsyncExitStack) -> list[Acquired]:
        """`count` requests, acquired, each with a listener until `stack` ends."""
        await self._worker.ensure_group()
        for _ in range(count):
            request = GenerateRequest(
                rid=new_rid(0),
                model=MODEL,
                prompts=(tuple(range(64)),),
                sampling=SamplingParams(),
                stop=StopConditions(max_tokens=1 << 20),
            )
            await stack.enter_async_context(self._subscriber.listen(channel_name(request.rid), START_S))
            await self._queue.submit(request, max_waiting=1 << 20, max_waiting_tokens=1 << 30)
        running: list[Acquired] = []
        while len(running) < count:
            running += await self._worker.acquire(await self._worker.read(count))
        return running

    async def commit(self, running: Sequence[Acquired], seq: int, *, end: bool = False) -> int:
        """One record of each request in one call; microseconds of server time."""
        items = [_item(one, seq, end=end) for one in running]
        before = await script_us(self._redis)
        replies = await self._worker.commit(items)
        took = await script_us(self._redis) - before
        assert {reply.kind for reply in replies} == {ReplyKind.OK}
        return took


def _item(one: Acquired, seq: int, *, end: bool) -> Commit:
    delta = Delta(token_ids=(1000 + seq % 1000,), text=" token", finish_reason="length" if end else None)
    usage = Usage(prompt_tokens=64, completion_tokens=seq + 1)
    record = Record(seq, (delta,), End(usage=usage) if end else None)
    return Commit(one.claim, seq, encode(record), end, usage.prompt_tokens, usage.completion_tokens)


async def measure(bench: Bench, records: int, calls: int) -> tuple[float, float, float]:
    """Server time per record in microseconds: of token records, median and lowest tenth, and of terminal ones."""
    tokens: list[int] = []
    terminal: list[int] = []
    rounds = max(10, calls // (10 * records))
    for _ in range(rounds):
        async with AsyncExitStack() as stack:
            running = await bench.begin(records, stack)
            each = max(2, calls // rounds)
            await bench.commit(running, 0)  # the first record of a request also takes it out of quarantine
            tokens += [await bench.commit(running, seq) for seq in range(1, each)]
            terminal.append(await bench.commit(running, each, end=True))
    median, lowest = statistics.median(tokens), statistics.quantiles(tokens, n=10)[0]
    return median / records, lowest / records, statistics.median(terminal) / records


async def run(url: str, sizes: Sequence[int], calls: int) -> bool:
    """Prints the table; whether token records keep the limit at every size."""
    redis, blocking = command_client(url), blocking_client(url)
    try:
        server = await check_server(redis)
        print(f"{server.name} {server.version}; server time per record, limit {LIMIT_US:g} us")
        print("records a call   token record   lowest tenth   terminal record   within the limit")
        kept = True
        async with Subscriber(url) as subscriber:
            bench = Bench(redis, blocking, subscriber)
            for records in sizes:
                token, lowest, terminal = await measure(bench, records, calls)
                kept &= token <= LIMIT_US
                verdict = "yes" if token <= LIMIT_US else "NO"
                print(f"{records:>14} {token:>11.1f} us {lowest:>11.1f} us {terminal:>14.1f} us   {verdict}")
        return kept
    finally:
        await redis.aclose()
        await blocking.aclose()


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--redis-url")
    arguments = parser.parse_args()
    async with AsyncExitStack() as stack:
        url = arguments.redis_url or await stack.enter_async_context(own_server())
        return 0 if await run(url, arguments.records, arguments.calls) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
