"""Each error of ours is the exception that OpenAI's client has for it, and what may be repeated is repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.clients.conftest import CAPITAL, KEY
from tests.e2e.conftest import REAL_MODEL
from tests.support.ports import free_port
from tests.support.stack import Pod, Stack

pytestmark = pytest.mark.real_model

ASK: dict[str, Any] = {"model": REAL_MODEL, "messages": [{"role": "user", "content": CAPITAL}], "temperature": 0}
LONG: dict[str, Any] = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(pod: Pod) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=pod.base_url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def narrow(real_stack: Stack) -> Iterator[str]:
    """A pod that carries six requests and lets one wait."""
    pod = real_stack.add_pod({"HEADRACE_MAX_STREAMS": "6", "HEADRACE_MAX_QUEUE_REQUESTS": "1"})
    real_stack.pods.remove(pod)
    yield pod.base_url
    pod.kill()


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"model": "no-such"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 9}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        ({"max_tokens": 9000}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, None, "response_format"),
        ({"store": True}, openai.BadRequestError, None, "store"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(
    client: openai.OpenAI, stream: bool, fields: Any, kind: type[openai.APIStatusError], code: str | None, param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**ASK | fields, stream=stream)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert code in (None, caught.value.code)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_a_wrong_key(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="sk-wrong").models.list()
    assert caught.value.code == "invalid_api_key"


def test_what_is_not_offered(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=REAL_MODEL, input="Hi")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such")
    with pytest.raises(openai.APIStatusError) as caught:
        client.models.delete(REAL_MODEL)
    assert caught.value.status_code == 405
    with pytest.raises(openai.BadRequestError) as bad:
        client.embeddings.create(model=REAL_MODEL, input="Hi", dimensions=12)
    assert bad.value.param == "dimensions"


def test_a_body_over_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**ASK, user="x" * (9 << 20))
    assert caught.value.status_code == 413


def test_an_error_after_the_first_token_is_raised_by_the_stream(real_stack: Stack) -> None:
    """Here because the pod is told to end and waits for nobody."""
    pod = real_stack.add_pod({"HEADRACE_DRAIN_TIMEOUT_S": "0"})
    real_stack.pods.remove(pod)
    with openai.OpenAI(base_url=pod.base_url, api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(**ASK, **LONG | {"max_tokens": 120}, stream=True)
        assert next(stream).id
        pod.terminate()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert type(caught.value) is openai.APIError  # not one of a connection that broke
    assert caught.value.code == "resume"
    assert pod.wait() == 0


def test_time_limit_and_a_server_that_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(**ASK, **LONG)
    with pytest.raises(openai.APIConnectionError):
        client.with_options(base_url=f"http://127.0.0.1:{free_port()}/v1").models.list()


def test_a_full_queue_is_the_rate_limit_error(real_stack: Stack, narrow: str) -> None:
    """While both workers hang each holds what it was about to read, one request may wait, the others may not."""
    with openai.OpenAI(base_url=narrow, api_key="none", max_retries=0) as client, ThreadPoolExecutor(6) as threads:
        for worker in real_stack.workers:
            worker.stop()
        try:
            calls = [threads.submit(client.chat.completions.create, **ASK, max_tokens=1) for _ in range(6)]
            refused, _ = wait(calls, 20, FIRST_EXCEPTION)
        finally:
            for worker in real_stack.workers:
                worker.cont()
        errors = [call.exception(60) for call in calls]
    assert refused
    assert any(error is None for error in errors)
    for error in filter(None, errors):
        assert isinstance(error, openai.RateLimitError)
        assert int(error.response.headers["retry-after"]) >= 1


def _speaking(client: openai.OpenAI) -> openai.Stream[Any]:
    """A stream that no longer waits in the queue, where there is room for one."""
    stream: openai.Stream[Any] = client.chat.completions.create(**ASK, **LONG, stream=True)
    while not next(stream).choices[0].delta.content:
        pass
    return stream


def test_a_busy_pod_is_asked_again(narrow: str) -> None:
    """The answers 503 are repeated after the time they name; here until the streams in the way are closed."""
    refused = threading.Event()

    def note(response: httpx.Response) -> None:
        if response.status_code == 503:
            assert response.headers["retry-after"] == "1"
            refused.set()

    with (
        openai.OpenAI(base_url=narrow, api_key="none", max_retries=0) as holder,
        openai.DefaultHttpxClient(event_hooks={"response": [note]}) as http,
        openai.OpenAI(base_url=narrow, api_key="none", max_retries=5, http_client=http) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        held = [_speaking(holder) for _ in range(6)]
        with pytest.raises(openai.InternalServerError) as caught:
            holder.chat.completions.create(**ASK, max_tokens=1)
        assert caught.value.status_code == 503
        answer = thread.submit(client.chat.completions.with_raw_response.create, **ASK, max_tokens=1)
        assert refused.wait(20)
        for stream in held:
            stream.close()
        raw = answer.result(60)
    assert raw.retries_taken >= 1
    assert raw.parse().choices[0].finish_reason == "length"
