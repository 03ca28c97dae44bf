"""Permits are counted exactly; retries are found by key or by body, never across tenants."""

from __future__ import annotations

import pytest

from api_service.admission import Admission
from api_service.retries import RETRY_WINDOW_MS, retry_key, same_request, shard_of_digest
from shared.errors import InvalidRequest, Overloaded
from shared.params import SamplingParams
from tests.support.records import make_request


def test_permits_are_counted_and_released_once() -> None:
    admission = Admission(2)
    first, _ = admission.admit(), admission.admit()
    with pytest.raises(Overloaded) as full:
        admission.admit()
    assert full.value.retry_after == 1.0
    first.release()
    first.release()
    assert admission.active == 1
    assert not admission.idle.is_set()
    admission.admit()


def digest(headers: dict[str, str], tenant: str = "t", path: str = "/p", body: bytes = b"{}") -> str:
    key = retry_key(headers, tenant, path, body)
    assert key is not None
    return key.digest


def test_an_idempotency_key_stands_for_tenant_and_path() -> None:
    headers = {"idempotency-key": "k"}
    assert digest(headers) == digest(headers, body=b"another")
    assert (
        len(
            {digest(headers), digest(headers, tenant="u"), digest(headers, path="/q"), digest({"idempotency-key": "l"})}
        )
        == 4
    )
    for bad in ("", "x" * 256):
        with pytest.raises(InvalidRequest):
            retry_key({"idempotency-key": bad}, "t", "/p", b"")


def test_sdk_retries_are_found_by_their_body() -> None:
    first = retry_key({"x-stainless-retry-count": "0"}, "t", "/p", b"{}")
    second = retry_key({"x-stainless-retry-count": "1"}, "t", "/p", b"{}")
    assert first is not None
    assert second is not None
    assert (first.attach, second.attach) == (False, True)
    assert first.digest == second.digest != digest({"x-stainless-retry-count": "1"}, body=b"{ }")
    assert first.ttl_ms == RETRY_WINDOW_MS
    assert retry_key({}, "t", "/p", b"") is None
    assert retry_key({"x-stainless-retry-count": "x"}, "t", "/p", b"") is None


def test_one_digest_one_shard() -> None:
    value = digest({"idempotency-key": "k"})
    assert {shard_of_digest(value, 16) for _ in range(3)} == {int(value[:8], 16) % 16}


def test_requests_are_the_same_whatever_seed_was_drawn() -> None:
    one = make_request(sampling=SamplingParams(seed=1))
    assert same_request(one, make_request(sampling=SamplingParams(seed=2), created=5))
    assert not same_request(one, make_request(sampling=SamplingParams(temperature=0.5)))
    assert not same_request(one, make_request(prompts=((1, 2),)))
