"""JSON bodies: syntax, shape and depth. Every fault is a 400 without an echo."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from api_service.body import MAX_DEPTH, check_content_type, parse_json
from api_service.schemas.chat import ChatCompletionRequest
from shared.errors import InvalidRequest, UnsupportedMediaType

GOOD = b'{"model":"m","messages":[{"role":"user","content":"x"}]%s}'


def refused(data: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse_json(data, ChatCompletionRequest)
    return error.value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"[1,2,3]",
        b"null",
        b"123",
        b'"s"',
        b'{"a":1',
        GOOD % b"" + b" trailing",
        (GOOD % b"").decode().encode("utf-16"),
        GOOD.replace(b"x", b"\xff") % b"",
        b"\xef\xbb\xbf" + GOOD % b"",
        GOOD.replace(b'"x"', b'"\\ud800"') % b"",
    ],
)
def test_err_03_what_is_no_json_object(data: bytes) -> None:
    error = refused(data)
    assert error.status == 400
    assert len(error.message) < 100


def test_err_03_duplicate_keys_last_wins() -> None:
    assert parse_json(GOOD % b',"n":1,"n":2', ChatCompletionRequest).n == 2


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"nan"'])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "min_tokens"]
)
def test_smp_01_non_finite_numbers(number: bytes, field: str) -> None:
    error = refused(GOOD % b',"%b":%b' % (field.encode(), number))
    assert "NaN" not in error.message
    assert error.param == field
    assert (refused(GOOD % b',"logit_bias":{"1":%b}' % number).param or "").startswith("logit_bias")


def test_smp_01_the_path_of_a_number_deep_inside() -> None:
    assert refused(GOOD % b',"metadata":{"a":[1,{"b":-Infinity}]},"n":0').param == "metadata.a[1].b"
    assert refused(b'{"a":NaN').param is None
    assert "deeply" in refused(b'{"a":NaN,"b":' + b"[" * 100_000 + b"]" * 100_000 + b"}").message


@pytest.mark.parametrize("depth", [100, 3000, 100_000])
@pytest.mark.parametrize("field", [b"tools", b"logit_bias", b"unknown", b"response_format", b"metadata"])
def test_lim_09_deep_nesting(depth: int, field: bytes) -> None:
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
        nested = opened * depth + b"1" + closed * depth
        assert refused(GOOD % b',"%b":%b' % (field, nested)).status == 400
    assert refused(b"[" * depth).status == 400


def test_depth_is_counted_exactly_and_wide_bodies_are_fine() -> None:
    inside = MAX_DEPTH - 1  # the body itself is one level
    parse_json(GOOD % (b',"x":' + b"[" * inside + b"]" * inside), ChatCompletionRequest)
    assert refused(GOOD % (b',"x":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH))
    parse_json(GOOD % (b',"x":[' + b"[]," * 5000 + b"[]]"), ChatCompletionRequest)


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ([], True),
        ([(b"content-type", b"application/json")], True),
        ([(b"content-type", b"Application/JSON; charset=utf-8")], True),
        ([(b"content-type", b"application/vnd.api+json")], True),
        ([(b"content-type", b"application/x-www-form-urlencoded")], False),
        ([(b"content-type", b"text/plain")], False),
        ([(b"content-type", b"")], False),
        ([(b"content-encoding", b"gzip")], False),
    ],
)
def test_err_04_content_types(headers: list[tuple[bytes, bytes]], accepted: bool) -> None:
    request = Request({"type": "http", "headers": headers})
    if accepted:
        check_content_type(request)
    else:
        with pytest.raises(UnsupportedMediaType):
            check_content_type(request)
