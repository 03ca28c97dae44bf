"""The clients' modules, with all that they import, ask no address beyond this machine; nor does any test here."""

from __future__ import annotations

import socket

import pytest

from tests.e2e.clients.conftest import OUTSIDE, WHILE_IMPORTING


def test_importing_the_clients_asks_nobody() -> None:
    assert WHILE_IMPORTING == []


def test_the_watch_sees_a_look_up() -> None:
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("nobody.invalid", 443, flags=socket.AI_NUMERICHOST)  # fails here, without a query
    assert OUTSIDE.pop() == "nobody.invalid"
    socket.getaddrinfo("127.0.0.1", 443)
    socket.getaddrinfo("localhost", 443)
    assert "localhost" not in OUTSIDE
    assert "127.0.0.1" not in OUTSIDE
