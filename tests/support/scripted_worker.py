"""A stand-in for a worker: real queue, real registry, but the tokens come from a script instead of an engine.

In: a Redis URL and a script (request -> steps of deltas). Out: committed records, one a step, through the real
ClaimQueue. A gate lets a test say how far it may go. Nothing of Redis is imitated here.
"""

from __future__ import annotations

import asyncio
import codecs
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Self

import msgspec
from redis.asyncio import Redis

from shared.claims import Acquired, ClaimQueue, Commit, Consumer, ReplyKind
from shared.connections import REDIS_DOWN, blocking_client, command_client
from shared.messages import Delta, End, FinishReason, GenerateRequest, ModelCard, Record, Usage, WorkerCard, encode
from shared.registry import blob_id, heartbeat, publish_model
from shared.text.token_bytes import TokenBytes
from tests.support import toy_tokenizers

__all__ = ["EOS_ID", "MODEL", "TEMPLATE", "ScriptedWorker", "model_card", "say", "say_each", "token_ids"]

MODEL = "tiny"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS_ID = 2
Steps = Sequence[Sequence[Delta]]
Script = Callable[[GenerateRequest], Steps]


def tokenizer_json() -> bytes:
    return toy_tokenizers.byte_level().to_str().encode()


_TOKEN_BYTES = TokenBytes.from_tokenizer_json(tokenizer_json())


def token_ids(text: str) -> list[int]:
    ids: list[int] = toy_tokenizers.byte_level().encode(text, add_special_tokens=False).ids
    return ids


def model_card(name: str = MODEL, template: str = TEMPLATE, **changes: object) -> ModelCard:
    card = ModelCard(
        name=name,
        created=1_700_000_000,
        max_model_len=256,
        max_request_tokens=256,
        vocab_size=toy_tokenizers.byte_level().get_vocab_size(),
        eos_token_ids=(EOS_ID,),
        tokenizer=blob_id(tokenizer_json()),
        chat_template=blob_id(template.encode()) if template else "",
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        fingerprint="fp_test",
    )
    return msgspec.structs.replace(card, **changes)


def say(text: str, *, finish: FinishReason = "stop", index: int = 0) -> list[list[Delta]]:
    """One step a token, with the characters that it completes, then the finish."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    pieces = [[Delta(index=index, token_ids=(i,), text=decode(_TOKEN_BYTES.bytes_of(i)))] for i in token_ids(text)]
    if finish == "stop":
        return [*pieces, [Delta(index=index, token_ids=(EOS_ID,), finish_reason="stop")]]
    last = msgspec.structs.replace(pieces[-1][0], finish_reason=finish)
    return [*pieces[:-1], [last]]


def say_each(texts: Iterable[str], *, finish: FinishReason = "stop") -> list[list[Delta]]:
    """All choices side by side: step k holds the k-th delta of every choice that still has one."""
    columns = [say(text, finish=finish, index=index) for index, text in enumerate(texts)]
    return [
        [delta for column in columns if step < len(column) for delta in column[step]]
        for step in range(max(map(len, columns)))
    ]


class ScriptedWorker:
    """`async with ScriptedWorker(url, script) as worker:`. When `gated`, `worker.allow(n)` lets more out."""

    def __init__(
        self,
        redis_url: str,
        script: Script,
        *,
        card: ModelCard | None = None,
        template: str = TEMPLATE,
        consumer: str = "scripted",
        shard: int = 0,
        gated: bool = False,
        lease_ms: int = 10_000,
        end: End | None = None,
    ) -> None:
        """`end`: replaces the terminal record's own (an error, for instance)."""
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.card = card or model_card()
        self.worker_card = WorkerCard(worker_id=consumer, model=self.card.name, state="ready", max_num_seqs=64)
        self._script = script
        self._template = template
        self._end = end
        self._limit = 0 if gated else sys.maxsize
        self._redis: Redis = command_client(redis_url)
        self._blocking: Redis = blocking_client(redis_url)
        self._claims = ClaimQueue(
            self._redis, self._blocking, Consumer(consumer, self.card.name, shard, lease_ms=lease_ms)
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def __aenter__(self) -> Self:
        await self._claims.ensure_group()
        await publish_model(self._redis, self.card, tokenizer_json(), self._template)
        await self._beat()
        self._spawn(self._heartbeats())
        self._spawn(self._intake())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()  # redis-py may swallow it, hence the flag as well
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()
        await self._blocking.aclose()

    def allow(self, records: int) -> None:
        """Every request may have so many more records."""
        self._limit += records

    def allow_all(self) -> None:
        """From now on nothing waits."""
        self._limit = sys.maxsize

    def _spawn(self, work: object) -> None:
        self._tasks.add(asyncio.create_task(work))  # type: ignore[arg-type]

    async def _beat(self) -> None:
        blobs = [tokenizer_json(), self._template.encode()]
        await heartbeat(self._redis, self.worker_card, self.card, [blob for blob in blobs if blob])

    async def _heartbeats(self) -> None:
        while not self._closing:
            with suppress(*REDIS_DOWN):
                await self._beat()
            await asyncio.sleep(0.2)

    async def _intake(self) -> None:
        while not self._closing:
            try:
                entries = await self._claims.read(16, block_ms=200)
                for acquired in await self._claims.acquire(entries):
                    self.requests.append(acquired.request)
                    self._spawn(self._work(acquired))
            except REDIS_DOWN:
                await asyncio.sleep(0.1)

    async def _work(self, acquired: Acquired) -> None:
        request, claim = acquired.request, acquired.claim
        steps = self._script(request)
        tokens = 0
        for seq, deltas in enumerate(steps):
            tokens += sum(len(delta.token_ids) for delta in deltas)
            if seq < acquired.next_seq:
                continue
            if not await self._permitted(acquired, seq):
                ends = tuple(Delta(index=i, finish_reason="abort") for i in range(request.num_choices))
                self.cancelled.append(request.rid)
                await self._commit(claim, Record(seq, ends, End(usage=Usage(request.prompt_tokens, tokens))), request)
                return
            last = seq == len(steps) - 1
            end = (self._end or End(usage=Usage(request.prompt_tokens, tokens))) if last else None
            if not await self._commit(claim, Record(seq, tuple(deltas), end), request):
                return

    async def _permitted(self, acquired: Acquired, seq: int) -> bool:
        """Waits for the gate; False when the request was cancelled meanwhile."""
        while not self._closing:
            with suppress(*REDIS_DOWN):
                [reply] = await self._claims.renew([acquired.claim])
                if reply.cancelled:
                    return False
            if seq < self._limit:
                return True
            await asyncio.sleep(0.02)
        raise asyncio.CancelledError

    async def _commit(self, claim: object, record: Record, request: GenerateRequest) -> bool:
        usage = record.end.usage if record.end else Usage()
        item = Commit(
            claim,  # type: ignore[arg-type]
            record.seq,
            encode(record),
            end=record.end is not None,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )
        deadline = time.monotonic() + 30
        while not self._closing:
            try:
                [reply] = await self._claims.commit([item])
                return reply.kind in (ReplyKind.OK, ReplyKind.DUP)
            except REDIS_DOWN:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
        return False
