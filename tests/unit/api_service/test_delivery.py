"""Streams to clients: what is written straight to the connection, what waits for it, and whose fault stays whose."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api_service.body_writer import BODY_WRITER
from api_service.chunks import StreamWriter
from api_service.delivery import EventStream, Pulse
from api_service.stream import Stream
from shared.messages import Delta, End, Record, encode
from tests.support.records import make_request
from tests.support.wait import eventually


class Connection:
    """ASGI's two ends and the server's direct one, over one list of pieces."""

    def __init__(self) -> None:
        self.ready = True
        self.pieces: list[tuple[str, bytes]] = []
        self.may_send = asyncio.Event()
        self.may_send.set()

    def write(self, data: bytes) -> None:
        self.pieces.append(("direct", data))

    async def send(self, message: Any) -> None:
        await self.may_send.wait()
        if message["type"] == "http.response.body":
            self.pieces.append(("send", message["body"]))

    async def receive(self) -> Any:
        await asyncio.Event().wait()


def record(seq: int, *, last: bool = False) -> Record:
    text = Delta(token_ids=(seq,), text=f"<{seq}>", finish_reason="stop" if last else None)
    return Record(seq, (text,), End() if last else None)


def push(stream: Stream, one: Record) -> None:
    stream.push(encode(one), one)


async def answering(connection: Connection, stream: Stream) -> asyncio.Task[None]:
    """The task of a handler that has sent the opening event and rests."""
    events = EventStream(stream, StreamWriter(stream.request, None), Pulse(10.0), lambda: None)
    scope = {"type": "http", "state": {BODY_WRITER: connection}}
    task = asyncio.create_task(events(scope, connection.receive, connection.send))

    async def rests() -> bool:
        return stream.direct is not None

    await eventually(rests)
    connection.pieces.clear()
    return task


async def test_pieces_go_straight_to_the_connection_until_it_is_full_and_stay_in_order() -> None:
    connection, stream = Connection(), Stream(make_request(), owned=True)
    task = await answering(connection, stream)
    push(stream, record(0))
    push(stream, record(1))
    assert [how for how, _ in connection.pieces] == ["direct", "direct"]  # no task had a turn
    connection.ready = False
    connection.may_send.clear()
    push(stream, record(2))
    await asyncio.sleep(0)  # the handler takes it and waits for the client
    connection.ready = True
    push(stream, record(3))
    connection.may_send.set()
    push(stream, record(4, last=True))
    await task
    said = b"".join(data for _, data in connection.pieces)
    assert [said.index(b"<%d>" % seq) for seq in range(5)] == sorted(said.index(b"<%d>" % seq) for seq in range(5))
    assert said.count(b"id: ") == 5
    assert said.endswith(b"data: [DONE]\n\n")
    assert [how for how, data in connection.pieces if b"<2>" in data] == ["send"]
    assert stream.direct is None


async def test_a_fault_in_one_stream_is_raised_in_its_handler_and_not_where_records_come_from() -> None:
    connection, stream = Connection(), Stream(make_request(), owned=True)
    task = await answering(connection, stream)

    def broken(_: bytes) -> None:
        raise ZeroDivisionError

    connection.write = broken  # type: ignore[method-assign]
    push(stream, record(0))
    with pytest.raises(ZeroDivisionError):
        await task
