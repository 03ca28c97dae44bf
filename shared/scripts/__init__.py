"""The Lua scripts: loads each file once, resolves its `-- @include`, calls it by hash (by text when Redis lost it).

In: the .lua files beside this one. Out: one `Script` each. Names and lifetimes come from shared/keys.py as Lua locals,
so no script spells one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from shared import keys

__all__ = [
    "ACQUIRE",
    "BURY",
    "CANCEL",
    "COMMIT",
    "DEPTH",
    "HAND_BACK",
    "POSITION",
    "RECLAIM",
    "RELEASE",
    "REMOVE_CONSUMER",
    "RENEW",
    "RESTORE",
    "SUBMIT",
    "TAKE",
    "TENANTS",
    "Arg",
    "Script",
]

Arg = str | bytes | int

_INCLUDE = "-- @include "

_CONSTANTS = f"""\
local GROUP, NOBODY = '{keys.GROUP}', '{keys.NOBODY}'
local OPEN_TTL, LOAD_TTL, LEDGER_TTL = {keys.OPEN_TTL_MS}, {keys.LOAD_TTL_MS}, {keys.LEDGER_TTL_MS}
local DEAD_TTL, DEAD_MAX = {keys.DEAD_TTL_MS}, {keys.DEAD_MAX}
local SEAT_TTL, SERVED_TTL, SERVED_MAX = {keys.SEAT_TTL_MS}, {keys.SERVED_TTL_MS}, {keys.SERVED_MAX}
local RID_LENGTH = {keys.RID_LENGTH}
local PART = {{{", ".join(f"{name} = '{part}'" for name, part in keys.QUEUE_PARTS.items())}}}
"""


def _text(name: str) -> str:
    source = files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
    return "".join(
        _text(line.removeprefix(_INCLUDE).strip()) if line.startswith(_INCLUDE) else line
        for line in source.splitlines(keepends=True)
    )


class Script:
    """One transition. Calling it is atomic in Redis; every script may be sent twice (a lost reply) without harm."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = _CONSTANTS + _text(name)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, redis: Redis, names: Sequence[str], args: Sequence[Arg]) -> Any:
        """The script's reply as redis-py gives it (bytes, ints, lists). `names` become KEYS, all of one hash tag."""
        send: Any = redis.execute_command
        try:
            return await send("EVALSHA", self.sha, len(names), *names, *args)
        except NoScriptError:  # a restarted or failed-over server, SCRIPT FLUSH: EVAL runs it and caches it again
            return await send("EVAL", self.text, len(names), *names, *args)


ACQUIRE = Script("acquire")
BURY = Script("bury")
CANCEL = Script("cancel")
COMMIT = Script("commit")
DEPTH = Script("depth")
HAND_BACK = Script("hand_back")
POSITION = Script("position")
RECLAIM = Script("reclaim")
RELEASE = Script("release")
REMOVE_CONSUMER = Script("remove_consumer")
RENEW = Script("renew")
RESTORE = Script("restore")
SUBMIT = Script("submit")
TAKE = Script("take")
TENANTS = Script("tenants")
