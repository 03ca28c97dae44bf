"""The Redis of the tests is the one that they started, or there is none."""

from __future__ import annotations

import pytest

from tests.support.redis_server import RedisServer


def test_ct_05_a_foreign_server_on_the_port_is_never_used() -> None:
    with RedisServer() as decoy:
        mine = RedisServer()
        mine.port = decoy.port
        with pytest.raises(RuntimeError, match=r"not by the server this test started|did not start"):
            mine.start()


def test_ct_05_a_server_that_was_replaced_is_noticed() -> None:
    with RedisServer() as server:
        server.check_identity()
        run_id = server.run_id
        server.restart()
        assert server.run_id != run_id
        server.run_id = run_id
        with pytest.raises(AssertionError):
            server.check_identity()
