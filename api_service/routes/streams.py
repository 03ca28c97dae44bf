"""GET /v1/streams/{id}: the rest of a stream, from any pod, then live; finished streams until their retention ends.

In: an id as any event shows it, and a cursor (Last-Event-ID, else starting_after; neither: from the start). Out: the
very events that the first connection would have got after that cursor.
"""

from __future__ import annotations

import re
from contextlib import ExitStack

from fastapi import APIRouter, Request, Response

from api_service.chunks import BEFORE_OPENING, StreamWriter
from api_service.routes.described import refusals, stream_of
from api_service.routes.generate import services_of, speller_for, stream_response
from api_service.schemas.answers import ChatCompletionChunk, TextCompletionChunk
from shared.errors import CursorAhead, InvalidRequest, RedisUnavailable, StreamExpired, StreamNotFound
from shared.keys import is_rid
from shared.queue import RequestState

__all__ = ["router"]

router = APIRouter(tags=["streams"])

_NUMBER = {"type": "string", "pattern": r"^(-1|[0-9]{1,12})$"}
_CURSORS = [
    {
        "name": "Last-Event-ID",
        "in": "header",
        "description": "The `id:` of the last event received; wins over `starting_after`.",
        "schema": {"type": "string", "pattern": r"^(chatcmpl-|cmpl-)?[0-9]{2}[0-9a-f]{24}:(-1|[0-9]{1,12})$"},
    },
    {"name": "starting_after", "in": "query", "description": "The number of that event.", "schema": _NUMBER},
]
_PREFIX = re.compile(r"^(chatcmpl-|cmpl-)")
_CURSOR = re.compile(r"-1|[0-9]{1,12}")


@router.get(
    "/v1/streams/{stream_id}",
    response_class=Response,
    openapi_extra={"parameters": _CURSORS},
    responses={
        200: {"description": "The rest of the stream.", "content": stream_of(ChatCompletionChunk, TextCompletionChunk)},
        **refusals(InvalidRequest, StreamNotFound, StreamExpired, RedisUnavailable),
    },
)
async def resume_stream(request: Request, stream_id: str) -> Response:
    """404 for what is no id of ours, 410 for a stream no longer kept, 400 for a cursor that it has not reached."""
    rid = _rid(stream_id)
    cursor, given_as = _cursor(rid, request.headers.get("last-event-id"), request.query_params.get("starting_after"))
    services = services_of(request)
    with ExitStack() as unless_answered:
        permit = services.admission.admit()
        unless_answered.callback(permit.release)
        stream, state = await services.relay.resume(rid, request.state.tenant)
        unless_answered.callback(stream.close)
        if stream.request.kind == "embedding":
            raise StreamNotFound("There is no stream of this id.", param="id")
        _check_cursor(cursor, given_as, state)
        speller = await speller_for(services, stream.request)
        unless_answered.pop_all()  # from here on the response owns permit and stream
    services.metrics.resumed()
    return stream_response(services, stream, StreamWriter(stream.request, speller, cursor), permit)


def _rid(stream_id: str) -> str:
    rid = _PREFIX.sub("", stream_id)
    if not is_rid(rid):
        raise StreamNotFound("There is no stream of this id.", param="id")
    return rid


def _cursor(rid: str, last_event_id: str | None, starting_after: str | None) -> tuple[int, str]:
    """The number and its parameter. A reconnecting EventSource repeats its URL and adds the header: that is newer."""
    if last_event_id:
        named, _, number = last_event_id.rpartition(":")
        if not is_rid(_PREFIX.sub("", named)):
            message = "'Last-Event-ID' must be an event's id as it came: the stream's id, a colon, a number."
            raise InvalidRequest(message, param="Last-Event-ID")
        if _PREFIX.sub("", named) != rid:
            raise InvalidRequest("'Last-Event-ID' belongs to another stream.", param="Last-Event-ID")
        return _number(number, "Last-Event-ID"), "Last-Event-ID"
    cursor = BEFORE_OPENING if starting_after is None else _number(starting_after, "starting_after")
    return cursor, "starting_after"


def _number(text: str, param: str) -> int:
    if not _CURSOR.fullmatch(text):
        raise InvalidRequest(f"'{param}' must end in the number of an event, -1 or more.", param=param)
    return int(text)


def _check_cursor(cursor: int, param: str, state: RequestState) -> None:
    """The usage event of a finished stream has the number after its last record."""
    newest = state.next - 1 + (state.state == "done" and state.request.include_usage)
    if cursor > newest:
        raise CursorAhead(f"The stream has not reached event {cursor}; its newest is {newest}.", param=param)
