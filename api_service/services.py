"""Everything a pod's routes use, made once from the settings: Redis clients, queue, registry view, relay, pools.

In: settings. Out: `Services`, opened and closed by the app's lifespan. No state that matters: what is here can die
with the process at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from api_service.admission import Admission
from api_service.affinity import Affinity
from api_service.delivery import Pulse
from api_service.metrics import Metrics
from api_service.prepare.chat import ChatOptions
from api_service.reachability import Reachability
from api_service.registry_view import RegistryView
from api_service.relay import Relay
from api_service.settings import Settings
from api_service.tenant_file import TenantFile
from api_service.tenants import Tenants
from api_service.turns import Turns
from shared.channel import Subscriber
from shared.connections import REDIS_DOWN, command_client
from shared.queue import RequestQueue

__all__ = ["Services"]

_PREPARE_THREADS = 2
"""Templates and parsing hold the GIL; more threads would only take turns with the event loop."""
_CLOSE_S = 1.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Services:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.redis = command_client(settings.redis_url)
        self.queue = RequestQueue(self.redis, retention_ms=settings.retention_ms)
        self.subscriber = Subscriber(settings.redis_url)
        self.reachability = Reachability(settings.redis_url)
        self.registry = RegistryView(
            self.redis, self.queue, self.reachability, settings.shards, settings.tool_call_parser
        )
        self.metrics = Metrics(lambda: self.registry.snapshot)
        self.relay = Relay(self.queue, self.redis, self.subscriber, self.reachability, self.metrics, settings)
        self.admission = Admission(settings.max_streams)
        self.pulse = Pulse(settings.keepalive_s)
        self.chat_options = ChatOptions(settings.trust_request_chat_template, settings.parse_control_tokens)
        self.tenant_file = TenantFile(settings.tenants, self.metrics.tenants_file)
        self.affinity = Affinity(lambda: self.registry.snapshot, enabled=settings.prefix_affinity)
        self.turns = Turns()
        self.draining = False
        self._pool = ThreadPoolExecutor(_PREPARE_THREADS, thread_name_prefix="prepare")

    async def open(self) -> None:
        self.reachability.start()
        self.registry.start()
        self.pulse.start()
        self.tenant_file.start()

    async def close(self) -> None:
        """Time-limited throughout: a Redis that does not answer must not keep the process alive."""
        self.pulse.close()
        await self.tenant_file.close()
        await self.relay.close()
        await self.registry.close()
        await self.reachability.close()
        await self.subscriber.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with suppress(*REDIS_DOWN):  # TimeoutError is an OSError and so among them
            async with asyncio.timeout(_CLOSE_S):
                await self.redis.aclose()

    @property
    def tenants(self) -> Tenants:
        """The rules that hold now."""
        return self.tenant_file.tenants

    async def in_thread(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs blocking work (templates, tokenizing, parsing) off the event loop, two at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))
