"""Listens to a shard's control channel: cancellations and wake-ups in, calls to intake and lease out.

The channel is the fast way only. What it loses is found again: cancel flags with the next renewal, work with the next
look of intake.
"""

from __future__ import annotations

import structlog

from engine_worker.intake import Intake
from engine_worker.lease import Lease
from shared.channel import Resync, Subscriber
from shared.keys import control_channel

__all__ = ["listen"]

log = structlog.get_logger(__name__)

_CANCEL = b"cancel:"


async def listen(subscriber: Subscriber, shard: int, intake: Intake, lease: Lease) -> None:
    """Listens for ever."""
    async with subscriber.listen(control_channel(shard)) as feed:
        while True:
            message = await feed.get()
            if message is None:
                continue
            if isinstance(message, Resync):
                lease.renew_now()
                intake.wake(shard)
            elif message.startswith(_CANCEL):
                intake.cancel(message.removeprefix(_CANCEL).decode(errors="replace"))
            elif message == b"wake":
                intake.wake(shard)
            else:
                log.warning("unknown control message", shard=shard)
