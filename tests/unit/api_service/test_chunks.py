"""Records to events: envelopes, roles, finish reasons, usage, errors; and resuming at every cursor."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from api_service.answers import Answer
from api_service.chunks import StreamWriter
from api_service.logprobs import Speller
from shared.messages import Delta, End, GenerateRequest, Reading, Record, TokenLogprob, Usage
from shared.params import SamplingParams
from tests.support.records import make_request
from tests.support.served import served

DONE = "[DONE]"


def events_of(data: bytes) -> list[tuple[str | None, Any]]:
    """(id, JSON or "[DONE]") of each event."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        parsed = DONE if fields["data"] == DONE else json.loads(fields["data"])
        events.append((fields.get("id"), parsed))
    return events


def speller(request: GenerateRequest) -> Speller:
    return Speller(served().vocabulary.token_bytes, skip_special_tokens=request.stop.skip_special_tokens)


def written(request: GenerateRequest, records: list[Record], cursor: int = -2) -> list[tuple[str | None, Any]]:
    writer = StreamWriter(request, speller(request), cursor)
    return events_of(writer.opening() + b"".join(map(writer.write, records)))


def answered(request: GenerateRequest, records: list[Record]) -> dict[str, Any]:
    answer = Answer(request, speller(request))
    for record in records:
        answer.add(record)
    assert answer.error is None
    body: dict[str, Any] = json.loads(answer.body())
    return body


def log(*steps: tuple[Delta, ...], usage: Usage | None = None) -> list[Record]:
    end = End(usage=usage or Usage(4, 3, 2))
    return [Record(seq, deltas, end if seq == len(steps) - 1 else None) for seq, deltas in enumerate(steps)]


SIMPLE = log((Delta(token_ids=(5,), text="He"),), (Delta(token_ids=(6,), text="llo"),), (Delta(finish_reason="stop"),))


def test_sse_01_02_one_id_object_and_created() -> None:
    kinds = (("chat", "chatcmpl-", "chat.completion.chunk"), ("completion", "cmpl-", "text_completion"))
    for kind, prefix, name in kinds:
        request = make_request(kind=kind, fingerprint="fp")
        chunks = [chunk for _, chunk in written(request, SIMPLE) if chunk != DONE]
        heads = {(c["id"], c["object"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}
        assert heads == {(prefix + request.rid, name, 1_700_000_000, "tiny", "fp")}


def test_every_event_but_done_carries_its_cursor() -> None:
    request = make_request(include_usage=True)
    rid = request.rid
    assert [i for i, _ in written(request, SIMPLE)] == [
        f"{rid}:-1",
        f"{rid}:0",
        f"{rid}:1",
        f"{rid}:2",
        f"{rid}:3",
        None,
    ]


def test_sse_03_04_role_once_for_each_choice_and_first() -> None:
    request = make_request(n=2)
    steps = [tuple(Delta(index=i, token_ids=(5,), text="a") for i in (0, 1))] * 2
    ends = tuple(Delta(index=i, finish_reason="length") for i in (0, 1))
    chunks = [chunk for _, chunk in written(request, log(*steps, ends)) if chunk != DONE]
    for index in (0, 1):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in deltas[1:])
        reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [reason for reason in reasons if reason] == ["length"]  # SSE-06
        assert reasons[-1] == "length"


def test_sse_13_records_without_news_are_no_events() -> None:
    held = log(
        (Delta(token_ids=(5,)),), (Delta(token_ids=(6,)),), (Delta(token_ids=(7,), text="abc", finish_reason="stop"),)
    )
    chunks = [chunk for _, chunk in written(make_request(), held)]
    assert len(chunks) == 3  # role, text with finish, [DONE]
    assert chunks[1]["choices"][0]["delta"] == {"content": "abc"}
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"


def test_use_01_02_usage_is_one_last_chunk_when_asked_for() -> None:
    chunks = [chunk for _, chunk in written(make_request(include_usage=True), SIMPLE)]
    assert chunks[-1] == DONE
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    assert all("usage" not in chunk for _, chunk in written(make_request(), SIMPLE) if chunk != DONE)


def test_the_usage_follows_the_finish_reason_with_nothing_but_data_between() -> None:
    """A client that takes an `id:` line for an empty chunk ends there."""
    request = make_request(include_usage=True)
    writer = StreamWriter(request, speller(request), -2)
    lines = [line for record in SIMPLE for line in writer.write(record).splitlines() if line]
    finish = next(i for i, line in enumerate(lines) if b'"finish_reason":"stop"' in line)
    assert lines[finish + 1].startswith(b"data: ")
    assert b'"choices":[],"usage":{' in lines[finish + 1]
    assert lines[finish + 2 :] == [b"id: %b:%d" % (request.rid.encode(), len(SIMPLE)), b"data: [DONE]"]


def test_continuous_usage_counts_tokens_not_chunks() -> None:
    request = make_request(include_usage=True, continuous_usage=True)
    steps = log((Delta(token_ids=(5, 6, 7), text="a"),), (Delta(token_ids=(8,), text="b", finish_reason="length"),))
    counts = [chunk["usage"]["completion_tokens"] for _, chunk in written(request, steps) if chunk != DONE]
    assert counts == [0, 3, 4, 3]


@pytest.mark.parametrize(
    ("end", "deltas", "code"),
    [
        (End("engine_failure", "It broke."), (), "engine_failure"),
        (End("deadline_exceeded", "Too late."), (), "deadline_exceeded"),
        (End("code_of_tomorrow", "?"), (), "internal_error"),
        (End(), (Delta(finish_reason="abort"),), "request_cancelled"),
    ],
)
def test_sse_10_rl_12_rl_13_an_error_is_an_event_and_no_clean_end(end: End, deltas: Any, code: str) -> None:
    request = make_request(include_usage=True)
    records = [Record(0, (Delta(token_ids=(5,), text="He"),)), Record(1, deltas, end)]
    *chunks, (event_id, error) = written(request, records)
    assert event_id is None  # so a client that resumes does so after the last real event
    assert (error["error"]["code"], error["error"]["request_id"]) == (code, request.rid)
    assert set(error["error"]) == {"message", "type", "param", "code", "request_id"}
    assert all(choice["finish_reason"] is None for _, chunk in chunks for choice in chunk["choices"])
    answer = Answer(request, None)
    for record in records:
        answer.add(record)
    assert answer.error is not None
    assert answer.error.code == code


def test_stop_reason_is_shown_when_there_is_one() -> None:
    records = log((Delta(token_ids=(5,), text="a", finish_reason="stop", stop_reason="\u2028x"),))
    assert written(make_request(), records)[1][1]["choices"][0]["stop_reason"] == "\u2028x"
    assert answered(make_request(), records)["choices"][0]["stop_reason"] == "\u2028x"
    assert "stop_reason" not in written(make_request(), SIMPLE)[-2][1]["choices"][0]


def test_nch_01_echo_of_every_choice() -> None:
    request = make_request(kind="completion", prompts=((1,), (2,), (3,)), n=2, echo=("A", "B", "C"))
    ends = tuple(Delta(index=i, token_ids=(5,), text=str(i), finish_reason="length") for i in range(6))
    body = answered(request, log(ends))
    assert [choice["text"] for choice in body["choices"]] == ["A0", "A1", "B2", "B3", "C4", "C5"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert joined(written(request, log(ends))) == {i: choice["text"] for i, choice in enumerate(body["choices"])}


def joined(events: list[tuple[str | None, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for _, chunk in events:
        for choice in chunk["choices"] if chunk != DONE else ():
            part = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (part or "")
    return texts


def random_log(rng: random.Random, choices: int, logprobs: int | None) -> list[Record]:
    """Choices gain tokens (some without text) and finish one after the other; the last record ends all."""
    texts = ["", "a", "\u2028", "日本", "x\ny"]
    open_choices, steps = set(range(choices)), []
    while open_choices:
        deltas = []
        for index in sorted(rng.sample(sorted(open_choices), rng.randint(1, len(open_choices)))):
            ids = tuple(rng.randrange(3, 300) for _ in range(rng.randint(0, 3)))
            lps = (
                tuple(TokenLogprob(i, -0.5, ((i, -0.5), (7, -1.5))[:logprobs]) for i in ids)
                if logprobs is not None
                else ()
            )
            finish = rng.choice(["stop", "length"]) if rng.random() < 0.2 else None
            deltas.append(Delta(index, ids, rng.choice(texts), lps, finish, finish and "x"))
            open_choices -= {index} if finish else set()
        steps.append(tuple(deltas))
    return log(*steps)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_rl_08_09_a_stream_resumed_at_any_event_equals_the_whole(kind: str, logprobs: int | None) -> None:
    rng = random.Random(3)
    for choices in (1, 1, 3):
        request = make_request(
            kind=kind,
            n=choices,
            include_usage=bool(rng.getrandbits(1)),
            sampling=SamplingParams(logprobs=logprobs),
            echo=("ä",) if kind == "completion" else (),
        )
        records = random_log(rng, choices, logprobs)
        whole = written(request, records)
        for cut, (event_id, _) in enumerate(whole):
            if event_id is not None:
                cursor = int(event_id.rsplit(":", 1)[1])
                assert written(request, records, cursor) == whole[cut + 1 :]
        assert len(whole) <= len(records) + 3  # RL-07: nothing is invented


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_joined_chunks_equal_the_whole_answer(kind: str, logprobs: int | None) -> None:
    rng = random.Random(11)
    for _ in range(10):
        request = make_request(kind=kind, n=3, sampling=SamplingParams(logprobs=logprobs))
        records = random_log(rng, 3, logprobs)
        body, events = answered(request, records), written(request, records)
        texts = [c["message"]["content"] if kind == "chat" else c["text"] for c in body["choices"]]
        assert joined(events) | {} == {i: text for i, text in enumerate(texts) if i in joined(events)}
        for index, choice in enumerate(body["choices"]):
            parts = [c for _, chunk in events if chunk != DONE for c in chunk["choices"] if c["index"] == index]
            found = [part["logprobs"] for part in parts if part["logprobs"]]
            if logprobs is None:
                assert found == []
                assert choice["logprobs"] is None
            elif kind == "chat":  # LGP-07
                assert [item for part in found for item in part["content"]] == choice["logprobs"]["content"]
            else:  # LGP-06
                for key in ("tokens", "token_logprobs", "text_offset"):
                    assert [item for part in found for item in part[key]] == choice["logprobs"][key]


def test_reasoning_tokens_in_the_usage_of_models_that_reason_whole_and_streamed() -> None:
    steps = log(
        (Delta(token_ids=(5,), text="Hm"),),
        (Delta(token_ids=(6, 7), text="</think>Yes", reasoning=2),),
        (Delta(token_ids=(2,), finish_reason="stop"),),
        usage=Usage(4, 4, reasoning_tokens=2),
    )
    request = make_request(reading=Reading(think="open"), include_usage=True, continuous_usage=True)
    usages = [chunk["usage"] for _, chunk in written(request, steps) if chunk != DONE]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 3, 4, 4]
    assert [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages] == [0, 0, 2, 2, 2]
    assert answered(request, steps)["usage"] == usages[-1]
    plain = make_request(include_usage=True)
    assert "completion_tokens_details" not in answered(plain, steps)["usage"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_the_short_way_for_plain_pieces_writes_what_the_long_one_does(kind: str, include_usage: bool) -> None:
    request = make_request(kind=kind, include_usage=include_usage, n=2)
    texts = ["a", "", 'q"\\\n', "\u2028\u0085", "\U0001f600"]
    records = log(*[(Delta(index=i % 2, token_ids=(i,), text=text),) for i, text in enumerate(texts)], (Delta(),))
    for cursor in (-2, 1):
        short, long = StreamWriter(request, None, cursor), StreamWriter(request, None, cursor)
        assert short._plain
        long._plain = False
        for record in records:
            assert short.write(record) == long.write(record)
