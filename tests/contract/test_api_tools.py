"""Tool calls through a real pod and a scripted worker: stream, whole answer, resumed stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.messages import Delta
from tests.support.api_pod import RawStream, chat_body, chunks_of, running_pod
from tests.support.scripted_worker import EOS_ID, ScriptedWorker, model_card

TOOLS = [{"type": "function", "function": {"name": "area", "parameters": {"type": "object", "properties": {"r": {}}}}}]
CALL = '{"name": "area", "arguments": {"r": 2}}'
TEXT = f"Hm.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL.replace('2', '3')}</tool_call>"
CARD = model_card(max_model_len=4096, max_request_tokens=4096)


def by_pieces(size: int, finish: str = "stop") -> list[list[Delta]]:
    parts = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    steps = [[Delta(token_ids=(5,), text=part)] for part in parts]
    return [*steps, [Delta(token_ids=(EOS_ID,), finish_reason=finish)]]  # type: ignore[arg-type]


def folded(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the deltas, with OpenAI's rules checked on the way (TLS-02)."""
    content, calls, reason = "", [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for entry in choice["delta"].get("tool_calls", ()):
                if entry["index"] == len(calls):
                    assert entry["id"]
                    assert entry["type"] == "function"
                    assert entry["function"]["arguments"] == ""
                    calls.append({key: value for key, value in entry.items() if key != "index"})
                else:
                    assert entry["index"] == len(calls) - 1
                    assert entry.keys() == {"index", "function"}
                    assert entry["function"].keys() == {"arguments"}
                    calls[-1]["function"]["arguments"] += entry["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    assert len({call["id"] for call in calls}) == len(calls)
    return {"content": content, "calls": calls, "reason": reason}


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_tls_02_tls_03_stream_and_whole_answer_agree_and_resume_repeats_ids(redis_url: str, size: int) -> None:
    async with ScriptedWorker(redis_url, lambda _: by_pieces(size), card=CARD), running_pod(redis_url) as pod:
        async with RawStream(pod, "/v1/chat/completions", chat_body(tools=TOOLS, stream=True)) as stream:
            events = [event async for event in stream]
        streamed = folded(chunks_of(events))
        assert streamed["content"] == "Hm."
        assert [json.loads(call["function"]["arguments"]) for call in streamed["calls"]] == [{"r": 2}, {"r": 3}]
        assert streamed["reason"] == "tool_calls"
        async with RawStream(pod, f"/v1/streams/{events[0]['id'].split(':')[0]}") as again:
            assert [event async for event in again] == events
        middle = (
            next(i for i, event in enumerate(events) if "call_" in event["data"] and "id" in event) if size == 1 else 0
        )
        async with RawStream(
            pod, f"/v1/streams/{events[0]['id'].split(':')[0]}", **{"Last-Event-ID": events[middle]["id"]}
        ) as rest:
            assert [event async for event in rest] == events[middle + 1 :]
        answer = (await pod.client.post("/v1/chat/completions", json=chat_body(tools=TOOLS))).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == streamed["content"]
        assert [call["function"] for call in message["tool_calls"]] == [call["function"] for call in streamed["calls"]]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_tls_07_length_wins(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, lambda _: by_pieces(3, "length"), card=CARD), running_pod(redis_url) as pod:
        answer = (await pod.client.post("/v1/chat/completions", json=chat_body(tools=TOOLS))).json()
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_tls_10_none_parses_nothing(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, lambda _: by_pieces(3), card=CARD), running_pod(redis_url) as pod:
        answer = (await pod.client.post("/v1/chat/completions", json=chat_body(tools=TOOLS, tool_choice="none"))).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        assert "tool_calls" not in answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "stop"
