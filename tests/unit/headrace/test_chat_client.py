"""The chat's client against a real HTTP server that breaks off where it is told to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import chat_client
from headrace.chat_client import ChatClient, ChatError, Event, Unreachable, read_events
from shared.errors import PodDraining
from tests.support.openai_stub import OpenAIStub

WORDS = ["Ca", "fé ", "日本", "\u2028line ", "separator", " 🫠", " end"]
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "FIRST_BACKOFF_S", 0.001)


def answer(stub: OpenAIStub) -> str:
    with stub, ChatClient(stub.base_url) as client:
        return "".join(client.answer("m", ASK))


@given(st.data())
def test_events_do_not_depend_on_how_the_bytes_were_cut(data: st.DataObject) -> None:
    first, rest = (
        ': c\r\n\r\nid: r:0\ndata: {"a": "\u2028é"}\n\n',
        "data: x\ndata:y\n\nevent: error\ndata: {}\r\n\r\ndata: cut",
    )
    raw = (first + rest).encode()
    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    chunks = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]
    assert list(read_events(chunks)) == [Event('{"a": "\u2028é"}', "r:0"), Event("x\ny"), Event("{}", "", "error")]


@pytest.mark.parametrize("cut", range(len(WORDS) + 2))
def test_a_connection_that_breaks_anywhere_goes_on_where_it_was(cut: int) -> None:
    stub = OpenAIStub(WORDS, cuts=[cut])
    assert answer(stub) == "".join(WORDS)
    if 0 < cut <= len(WORDS):
        assert [(method, path) for method, path, _, _ in stub.requests][1:] == [("GET", "/v1/streams/r1")]
        assert stub.requests[1][2]["Last-Event-ID"] == f"r1:{cut - 1}"


def test_breaking_after_every_event_still_ends() -> None:
    assert answer(OpenAIStub(WORDS, cuts=[1] * (len(WORDS) + 1))) == "".join(WORDS)


def test_before_the_first_event_the_same_question_is_asked_again_under_the_same_key() -> None:
    stub = OpenAIStub(WORDS, cuts=[0, 0])
    assert answer(stub) == "".join(WORDS)
    keys = [headers["Idempotency-Key"] for _, _, headers, _ in stub.requests]
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_a_server_without_ids_that_breaks_off_is_an_error_not_a_short_answer() -> None:
    stub = OpenAIStub(WORDS, cuts=[3], ids=False)
    said: list[str] = []
    with stub, ChatClient(stub.base_url) as client, pytest.raises(ChatError, match="was lost"):
        said.extend(client.answer("m", ASK))  # extend keeps what came before the error
    assert said == WORDS[:3]


def test_a_server_that_keeps_breaking_is_given_up() -> None:
    stub = OpenAIStub(WORDS, cuts=[2] + [0] * 50)
    with stub, ChatClient(stub.base_url) as client, pytest.raises(ChatError, match="was lost"):
        list(client.answer("m", ASK))


def test_a_server_without_done_is_understood() -> None:
    assert answer(OpenAIStub(WORDS, done=False, ids=False)) == "".join(WORDS)


def test_a_refusal_is_told_in_the_servers_words() -> None:
    with pytest.raises(ChatError, match="answered 404: no such thing"):
        answer(OpenAIStub(WORDS, status=404))


def test_a_server_that_is_not_there() -> None:
    stub = OpenAIStub(WORDS)
    with stub:
        url = stub.base_url
    with ChatClient(url) as client, pytest.raises(Unreachable, match=r"cannot be reached.*headrace serve.*--base-url"):
        client.models()


def test_an_address_without_v1_is_answered_with_the_right_one() -> None:
    with OpenAIStub(WORDS, status=404) as stub:
        short = stub.base_url.removesuffix("/v1")
        with ChatClient(short) as client:
            with pytest.raises(ChatError, match=rf"404: .*--base-url {stub.base_url}$"):
                client.models()
            with pytest.raises(ChatError, match=rf"404: .*--base-url {stub.base_url}$"):
                list(client.answer("m", ASK))
        with ChatClient(stub.base_url) as client, pytest.raises(ChatError, match=r"404: no such thing$"):
            list(client.answer("m", ASK))


def test_an_address_without_a_scheme_is_answered_with_the_right_one() -> None:
    with ChatClient("here:8000/v1") as client, pytest.raises(Unreachable, match=r"--base-url http://here:8000/v1$"):
        client.models()


def test_a_page_that_is_no_api_is_told() -> None:
    stub = OpenAIStub(WORDS)
    stub.model = {"name": "a model without an id"}
    with stub, ChatClient(stub.base_url) as client, pytest.raises(ChatError, match="no list of models"):
        client.models()


def test_a_server_that_shuts_down_is_left_for_the_next() -> None:
    stub = OpenAIStub(WORDS, cuts=[3])
    stub.farewell = {"message": "shutting down", "code": PodDraining.code}
    assert answer(stub) == "".join(WORDS)
    assert stub.requests[-1][2]["Last-Event-ID"] == "r1:2"


def test_an_error_event_ends_the_answer_in_the_servers_words() -> None:
    stub = OpenAIStub(WORDS, cuts=[3])
    stub.farewell = {"message": "It ended two workers.", "code": "request_poisoned"}
    with pytest.raises(ChatError, match="It ended two workers"):
        answer(stub)
    assert len(stub.requests) == 1
