"""What chat and text completions do alike: admit, parse, prepare, queue, and answer as a stream or as one JSON body.

In: a request, the model of its body and how to prepare it. Out: a response that holds the permit until its last byte.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api_service.admission import Permit
from api_service.answers import Answer
from api_service.body import INLINE_BYTES, check_content_type, parse_json
from api_service.chunks import StreamWriter
from api_service.delivery import EventStream, Folding, collect
from api_service.logprobs import Speller
from api_service.prepare.model import ServedModel
from api_service.rate_headers import rate_headers
from api_service.retries import RetryKey, retry_key, shard_of_digest
from api_service.schemas.common import Body, GenerationBody, QueuedBody
from api_service.services import Services
from api_service.stream import Stream
from api_service.tenants import Tenant
from shared.connections import REDIS_DOWN
from shared.errors import InvalidRequest, Overloaded, PodDraining, RedisUnavailable
from shared.keys import new_rid
from shared.limits import NO_LIMITS, Terms
from shared.messages import GenerateRequest
from shared.params import SamplingParams

__all__ = ["generate", "name_ignored", "services_of", "speller_for", "stream_response"]

KEEP_RUNNING = "X-Headrace-Keep-Running"
"""Seconds a request goes on after its client has gone."""
REQUEST_TIMEOUT = "X-Request-Timeout"
"""Seconds in which a request must have been started."""
_MAX_KEEP_RUNNING_S = 3600.0
_MAX_TIMEOUT_S = 86_400.0
_CLIENT_GONE = 499

BodyT = TypeVar("BodyT", bound=QueuedBody)
Fold = Callable[[BodyT, GenerateRequest, Speller | None], Folding]
"""Makes what folds records into the answer of a body that is not streamed."""


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _answer(_: QueuedBody, request: GenerateRequest, speller: Speller | None) -> Folding:
    return Answer(request, speller)


async def generate(
    request: Request,
    body_type: type[BodyT],
    prepare: Callable[[BodyT, ServedModel], GenerateRequest],
    fold: Fold[BodyT] = _answer,
) -> Response:
    """Raises HeadraceError for everything that is refused before the first byte."""
    services = services_of(request)
    with ExitStack() as unless_answered:
        permit = services.admission.admit()
        unless_answered.callback(permit.release)
        check_content_type(request)
        data = await request.body()
        body = await _parsed(services, data, body_type)
        tenant = request.state.tenant
        retry = retry_key(request.headers, tenant, request.url.path, data)
        grace_s = _seconds(request, KEEP_RUNNING, _MAX_KEEP_RUNNING_S)
        deadline_s = _deadline(request, body)
        model = await services.registry.served(body.model)
        quick = body.quick and len(data) <= INLINE_BYTES
        prepared = prepare(body, model) if quick else await services.in_thread(prepare, body, model)
        counted = services.tenants.of(tenant, body.user)
        queued = msgspec.structs.replace(
            prepared,
            share=counted.share,
            weight=counted.weight,
            klass=body.klass,
            service_tier=body.tier,
            sampling=_seeded(prepared.sampling, body, services.settings.seed),
            rid=new_rid(_shard(services, retry, counted)),
            tenant=tenant,
            created=int(time.time()),
            deadline_ms=await _redis_deadline(services, deadline_s),
            grace_ms=int((grace_s or 0) * 1000),
        )
        preference = services.affinity.prefer(queued)
        terms = Terms(counted.limits, preference.worker)
        stream = await services.relay.open(queued, retry, deadline_s, terms)
        services.affinity.follow(preference, stream)
        unless_answered.pop_all()  # from here on the response owns the permit
        speller = _speller(model, stream.request)
        response: Response
        if isinstance(body, GenerationBody) and body.stream:
            response = stream_response(services, stream, StreamWriter(stream.request, speller), permit)
        else:
            answer = fold(body, stream.request, speller)
            response = await _whole(services, stream, answer, permit, request, resumable=retry is not None)
        for name, value in rate_headers(stream.use).items():
            response.raw_headers.append((name.encode(), value.encode()))
        return name_ignored(response, body)


async def _parsed(services: Services, data: bytes, body_type: type[BodyT]) -> BodyT:
    """The body, when its turn has come; a large one is read in a thread. Raises InvalidRequest."""
    await services.turns.take()
    parsing = partial(parse_json, data, body_type)
    return parsing() if len(data) <= INLINE_BYTES else await services.in_thread(parsing)


def name_ignored(response: Response, body: Body) -> Response:
    """Tells in a header which fields of the body were accepted and are not used."""
    if body.ignored:
        response.raw_headers.append((b"x-ignored-params", ", ".join(body.ignored).encode()))
    return response


def stream_response(services: Services, stream: Stream, writer: StreamWriter, permit: Permit) -> EventStream:
    def done() -> None:
        services.relay.leave(stream)
        permit.release()

    return EventStream(stream, writer, services.pulse, done)


async def speller_for(services: Services, request: GenerateRequest) -> Speller | None:
    """From the request's metadata alone, for a pod that resumes its stream. Raises ModelNotFound, RedisUnavailable."""
    if not _spells(request):
        return None
    vocabulary = await services.registry.vocabulary(request.tokenizer)
    return Speller(vocabulary.token_bytes, skip_special_tokens=request.stop.skip_special_tokens)


def _spells(request: GenerateRequest) -> bool:
    return request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None


def _speller(model: ServedModel, request: GenerateRequest) -> Speller | None:
    if not _spells(request):
        return None
    return Speller(model.vocabulary.token_bytes, skip_special_tokens=request.stop.skip_special_tokens)


async def _whole(
    services: Services,
    stream: Stream,
    answer: Folding,
    permit: Permit,
    request: Request,
    *,
    resumable: bool,
) -> Response:
    try:
        finished = await collect(stream, answer, request.receive)
    except PodDraining:
        if resumable:
            why = "This server is shutting down. Send the request again with the same key: its answer goes on."
            raise PodDraining(why, retry_after=1.0) from None
        services.relay.cancel(stream)  # nobody could find it again
        why = "This server is shutting down and the answer was not finished. Send the request again."
        raise Overloaded(why, retry_after=1.0) from None
    finally:
        services.relay.leave(stream)
        permit.release()
    if not finished:
        return Response(status_code=_CLIENT_GONE)
    return Response(answer.body(), media_type="application/json")


def _seeded(sampling: SamplingParams, body: QueuedBody, default: int | None) -> SamplingParams:
    """The pod's own seed, when it has one, for a request that brings none."""
    brought = isinstance(body, GenerationBody) and body.seed is not None
    return sampling if brought or default is None else replace(sampling, seed=default)


def _shard(services: Services, retry: RetryKey | None, counted: Tenant) -> int:
    """All requests of a limited share go to one shard, because only there its limits are counted."""
    shards = services.settings.shards
    if counted.limits != NO_LIMITS:
        return shard_of_digest(hashlib.sha256(counted.share.encode()).hexdigest(), shards)
    return random.randrange(shards) if retry is None else shard_of_digest(retry.digest, shards)


def _deadline(request: Request, body: QueuedBody) -> float | None:
    """Seconds from now, the shorter one of header and field."""
    header = _seconds(request, REQUEST_TIMEOUT, _MAX_TIMEOUT_S)
    field = None if body.deadline_ms is None else body.deadline_ms / 1000
    given = [seconds for seconds in (header, field) if seconds is not None]
    return min(given, default=None)


def _seconds(request: Request, header: str, most: float) -> float | None:
    given = request.headers.get(header)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= most:
        raise InvalidRequest(f"The header '{header}' must be a number of seconds up to {most:g}.", param=header)
    return seconds


async def _redis_deadline(services: Services, deadline_s: float | None) -> int:
    """By the clock that workers are measured with."""
    if deadline_s is None:
        return 0
    try:
        seconds, micros = await services.relay.detached(_redis_time(services))
    except REDIS_DOWN as error:
        raise RedisUnavailable("The queue cannot be reached at the moment. Try again.", retry_after=1.0) from error
    return int(seconds * 1000 + micros // 1000 + deadline_s * 1000)


async def _redis_time(services: Services) -> tuple[int, int]:
    seconds, micros = await services.redis.time()
    return seconds, micros
