"""The error tree: OpenAI's `type` follows from the status, so that clients blame the right side."""

from __future__ import annotations

import pytest

from shared.errors import ERRORS_BY_CODE, HeadraceError

TYPES = {408: {"timeout_error"}, 429: {"rate_limit_error", "requests"}, 500: {"server_error"}}
TYPES[503] = {"service_unavailable_error"}


@pytest.mark.parametrize("error", ERRORS_BY_CODE.values(), ids=ERRORS_BY_CODE)
def test_what_the_client_did_is_no_server_error(error: type[HeadraceError]) -> None:
    """All other statuses are those of refused requests: 4xx."""
    assert 400 <= error.status < 500 or error.status in TYPES
    assert error.type in TYPES.get(error.status, {"invalid_request_error"})
    assert error("Why.").body()["error"]["type"] == error.type
