"""Case OPS-05: a pooled connection that was idle for a while is used again."""

from __future__ import annotations

import http.client
import select
from urllib.parse import urlsplit

import pytest

from api_service.settings import Settings

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(120)]

SERVERS_HABIT_S = 5
"""After which uvicorn closes idle connections by itself."""
CLIENTS_IDLE_S = 90
"""As long as proxies and clients keep theirs."""


def test_ops_05_idle_connections_stay_usable(url: str) -> None:
    split = urlsplit(url)
    connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=30)
    connection.request("GET", "/v1/models")
    first = connection.getresponse()
    assert first.status == 200
    first.read()
    local = connection.sock.getsockname()

    closed, _, _ = select.select([connection.sock], [], [], SERVERS_HABIT_S + 2)

    assert not closed, "the pod ended an idle connection"
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200
    assert connection.sock.getsockname() == local, "another connection"
    connection.close()


def test_ops_05_pods_wait_longer_than_clients() -> None:
    assert Settings.model_fields["timeout_keep_alive"].default > CLIENTS_IDLE_S
