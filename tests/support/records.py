"""Makes requests and records for tests: everything has a default, a test names only what it is about."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.keys import new_rid
from shared.messages import Delta, End, FinishReason, GenerateRequest, Record, Usage, decode_record, encode
from shared.params import SamplingParams, StopConditions

__all__ = ["again", "end_record", "make_request", "token_record", "tokens_of"]


def make_request(**changes: Any) -> GenerateRequest:
    """A request of four prompt tokens for model "tiny"; `max_tokens` is accepted beside the fields."""
    max_tokens = changes.pop("max_tokens", 16)
    shard = changes.pop("shard", 0)
    fields: dict[str, Any] = {
        "rid": new_rid(shard),
        "model": "tiny",
        "prompts": ((1, 2, 3, 4),),
        "sampling": SamplingParams(temperature=0.0),
        "stop": StopConditions(max_tokens=max_tokens),
        "created": 1_700_000_000,
    }
    return GenerateRequest(**(fields | changes))


def token_record(seq: int, *token_ids: int, index: int = 0, finish_reason: FinishReason | None = None) -> bytes:
    """Record `seq`: one choice gains these tokens (by default the one token 100 + seq)."""
    ids = token_ids or (100 + seq,)
    delta = Delta(index=index, token_ids=ids, text="".join(f"<{i}>" for i in ids), finish_reason=finish_reason)
    return encode(Record(seq=seq, deltas=(delta,)))


def end_record(seq: int, prompt_tokens: int = 4, completion_tokens: int = 1) -> bytes:
    """The terminal record of a one-choice request that stopped."""
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    return encode(Record(seq=seq, deltas=(Delta(finish_reason="stop"),), end=End(usage=usage)))


def tokens_of(records: list[bytes], index: int = 0) -> list[int]:
    """All token ids of one choice; AssertionError unless seq is 0, 1, 2, … without a gap."""
    decoded = [decode_record(record) for record in records]
    assert [record.seq for record in decoded] == list(range(len(decoded)))
    return [i for record in decoded for delta in record.deltas if delta.index == index for i in delta.token_ids]


def again(request: GenerateRequest) -> GenerateRequest:
    """The same request under a new id."""
    return msgspec.structs.replace(request, rid=new_rid(0))
