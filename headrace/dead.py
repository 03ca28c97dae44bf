"""`headrace dead`: requests that ended the workers that ran them, put aside so that they harm nobody else.

In: a Redis client and request ids. Out: a list, one request in full, or a request queued again or forgotten.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from redis.asyncio import Redis

from headrace.tables import console, table
from shared.keys import shard_of
from shared.messages import decode_request
from shared.queue import DeadLetter, RequestQueue

__all__ = ["drop", "list_letters", "replay", "show"]

_MOST = 10_000
"""Letters looked through per shard; Redis keeps fewer."""


async def list_letters(redis: Redis, shards: int, as_json: bool) -> int:
    """Prints every dead letter, newest first. Returns the exit code, as all of this module do."""
    queue = RequestQueue(redis)
    letters = [letter for shard in range(shards) for letter in await queue.dead_letters(shard, _MOST)]
    letters.sort(key=_milliseconds, reverse=True)
    if as_json:
        print(json.dumps([_summary(letter) for letter in letters], indent=2))
    elif not letters:
        print("No dead letters.")
    else:
        columns = ("request", "when", "model", "tries", "code", "message")
        rows = [[_summary(letter)[column] for column in columns] for letter in letters]
        console().print(table(columns, rows))
    return 0


async def show(redis: Redis, rid: str) -> int:
    """Prints one dead letter with its whole request as JSON."""
    letter = await _find(redis, rid)
    if letter is None:
        return _missing(rid)
    print(json.dumps({**_summary(letter), "body": _body(letter)}, indent=2))
    return 0


async def replay(redis: Redis, rids: Sequence[str]) -> int:
    """Queues the requests again under new ids, which it prints."""
    code = 0
    for rid in rids:
        letter = await _find(redis, rid)
        new = await RequestQueue(redis).replay(letter.id, shard_of(rid)) if letter else None
        if new is None:
            code = _missing(rid)
        else:
            print(f"{rid} queued again as {new}")
    return code


async def drop(redis: Redis, rids: Sequence[str]) -> int:
    """Forgets the requests."""
    code = 0
    for rid in rids:
        letter = await _find(redis, rid)
        if letter is None or not await RequestQueue(redis).drop(letter.id, shard_of(rid)):
            code = _missing(rid)
        else:
            print(f"{rid} dropped")
    return code


async def _find(redis: Redis, rid: str) -> DeadLetter | None:
    try:
        shard = shard_of(rid)
    except ValueError:
        return None
    letters = await RequestQueue(redis).dead_letters(shard, _MOST)
    return next((letter for letter in letters if letter.rid == rid), None)


def _missing(rid: str) -> int:
    print(f"headrace: there is no dead letter {rid} (see: headrace dead list)", file=sys.stderr)
    return 1


def _milliseconds(letter: DeadLetter) -> int:
    return int(letter.id.partition("-")[0])


def _summary(letter: DeadLetter) -> dict[str, Any]:
    when = datetime.fromtimestamp(_milliseconds(letter) / 1000, UTC)
    return {
        "request": letter.rid,
        "when": when.strftime("%Y-%m-%d %H:%M:%S UTC"),
        "model": letter.model,
        "tenant": letter.tenant,
        "tries": letter.tries,
        "code": letter.code,
        "message": letter.message,
    }


def _body(letter: DeadLetter) -> Any:
    """The request as plain data; what cannot be read is shown as hex, for it may be the reason."""
    try:
        return msgspec.to_builtins(decode_request(letter.body))
    except msgspec.DecodeError:
        return {"unreadable": letter.body.hex()}
