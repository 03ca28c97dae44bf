"""What models and workers exist. Workers write cards and blobs with a TTL, pods read them; nobody deletes.

In: cards and tokenizer files. Out: the same, by model name and by content hash. A card that is not refreshed
disappears, and the model with it; a pod needs nothing but Redis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from shared import keys
from shared.connections import together
from shared.errors import ModelNotFound
from shared.messages import ModelCard, WorkerCard, encode
from shared.prefixes import unpack

__all__ = [
    "blob_id",
    "heartbeat",
    "list_models",
    "list_workers",
    "load_blob",
    "load_prefixes",
    "publish_model",
    "publish_prefixes",
    "withdraw_worker",
]

_CardT = TypeVar("_CardT", ModelCard, WorkerCard)
_model_decoder = msgspec.msgpack.Decoder(ModelCard)
_worker_decoder = msgspec.msgpack.Decoder(WorkerCard)


def blob_id(content: bytes) -> str:
    """The sha256 in hex under which a blob is kept."""
    return hashlib.sha256(content).hexdigest()


async def publish_model(redis: Redis, card: ModelCard, tokenizer_json: bytes, chat_template: str) -> None:
    """Makes a model known. Blobs first: whoever sees the card finds what it names.

    Raises ValueError when the card's hashes are not those of the contents.
    """
    template = chat_template.encode()
    if card.tokenizer != blob_id(tokenizer_json) or card.chat_template != (blob_id(template) if template else ""):
        raise ValueError("the model card does not name the tokenizer and template given with it")
    for blob in (tokenizer_json, template):
        if blob:
            await redis.set(keys.blob_key(blob_id(blob)), blob, px=keys.BLOB_TTL_MS)
    await together(redis, *_card(keys.models_key(), card.name, keys.model_key(card.name), card, keys.MODEL_TTL_MS))


async def heartbeat(
    redis: Redis, worker_card: WorkerCard, model_card: ModelCard | None, blobs: Sequence[bytes] = ()
) -> bool:
    """Refreshes both cards and the life of the model's blobs, about once a second.

    `model_card` None: the worker is alive but offers no model yet (loading). `blobs` are written again when Redis lost
    them (FLUSHALL); False = some are lost and were not given: call publish_model.
    """
    name = worker_card.worker_id
    shas = [sha for sha in (model_card.tokenizer, model_card.chat_template) if sha] if model_card is not None else []
    renewals = [("PEXPIRE", keys.blob_key(sha), keys.BLOB_TTL_MS) for sha in shas]
    card = _card(keys.workers_key(), name, keys.worker_key(name), worker_card, keys.WORKER_TTL_MS)
    *kept, _, _, _ = await together(redis, *renewals, *card)
    if model_card is None:
        return True
    given = {blob_id(blob): blob for blob in blobs} if blobs else {}
    complete = True
    for sha, there in zip(shas, kept, strict=True):
        if there:
            continue
        if sha in given:
            await redis.set(keys.blob_key(sha), given[sha], px=keys.BLOB_TTL_MS)
        else:
            complete = False
    if complete:  # never a card whose tokenizer cannot be loaded
        name = model_card.name
        await together(redis, *_card(keys.models_key(), name, keys.model_key(name), model_card, keys.MODEL_TTL_MS))
    return complete


async def publish_prefixes(redis: Redis, worker_id: str, packed: bytes) -> None:
    """What the worker has cached, as `PrefixMemory.packed` gives it."""
    await redis.set(keys.prefixes_key(worker_id), packed, px=keys.PREFIXES_TTL_MS)


async def load_prefixes(redis: Redis, worker_ids: Sequence[str]) -> dict[str, frozenset[bytes]]:
    """The fingerprints of each of these workers; of one that published none, the empty set."""
    held: dict[str, frozenset[bytes]] = {}
    for worker_id in worker_ids:
        packed: Any = await redis.get(keys.prefixes_key(worker_id))
        held[worker_id] = unpack(packed or b"")
    return held


async def withdraw_worker(redis: Redis, worker_id: str) -> None:
    """A worker that leaves in order takes its card along."""
    await redis.delete(keys.worker_key(worker_id), keys.prefixes_key(worker_id))
    await redis.srem(keys.workers_key(), worker_id)


async def list_models(redis: Redis) -> dict[str, ModelCard]:
    """Every model some worker has refreshed within MODEL_TTL_MS, by name. Cards of an unknown layout are left out."""
    return {card.name: card for card in await _cards(redis, keys.models_key(), keys.model_key, _model_decoder)}


async def list_workers(redis: Redis) -> list[WorkerCard]:
    """Every worker with a heartbeat within WORKER_TTL_MS, by id."""
    return await _cards(redis, keys.workers_key(), keys.worker_key, _worker_decoder)


async def load_blob(redis: Redis, sha: str) -> bytes:
    """A tokenizer.json or template by its hash, checked. Raises ModelNotFound when lost; workers bring it back."""
    blob: Any = await redis.get(keys.blob_key(sha))
    if blob is None or blob_id(blob) != sha:
        raise ModelNotFound("The model's tokenizer is not in Redis at the moment. Try again in a second.")
    return bytes(blob)


def _card(index: str, name: str, key: str, card: msgspec.Struct, ttl_ms: int) -> list[tuple[Any, ...]]:
    """The commands that store a card and its name."""
    index_ttl = ("PEXPIRE", index, keys.BLOB_TTL_MS)
    return [("SET", key, encode(card), "PX", ttl_ms), ("SADD", index, name), index_ttl]


async def _cards(redis: Redis, index: str, key_of: Any, decoder: msgspec.msgpack.Decoder[_CardT]) -> list[_CardT]:
    """Cards of an index set; names whose card has expired leave it (a late heartbeat simply adds them again)."""
    members: Any = await redis.smembers(index)
    names = sorted(name.decode() for name in members)
    cards: list[_CardT] = []
    stored = await together(redis, *[("GET", key_of(name)) for name in names]) if names else []
    for name, data in zip(names, stored, strict=True):
        if data is None:
            await redis.srem(index, name)
            continue
        try:
            cards.append(decoder.decode(data))
        except msgspec.DecodeError:  # a newer version's card: not for us
            continue
    return cards
