"""JSON inside events survives every way of splitting lines."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from api_service.sse import event, json_bytes


@given(
    st.text(
        alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("\u2028\u2029\x85\x0b\x1c\r\n"))
    )
)
def test_sse_08_no_line_boundary_of_unicode_is_left_in_an_event(text: str) -> None:
    data = json_bytes({"text": text})
    assert json.loads(data) == {"text": text}
    assert data.decode().splitlines() == [data.decode()]
    framed = event(data, "rid:1").decode()
    assert framed.splitlines() == ["id: rid:1", f"data: {data.decode()}", ""]


def test_json_has_no_nan() -> None:
    assert json_bytes([float("nan"), float("inf")]) == b"[null,null]"
