"""Models and workers appear with their first card and disappear with their last heartbeat."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from shared import keys
from shared.errors import ModelNotFound
from shared.messages import ModelCard, WorkerCard
from shared.registry import blob_id, heartbeat, list_models, list_workers, load_blob, publish_model, withdraw_worker

TOKENIZER, TEMPLATE = b'{"model": {}}', "{{ messages }}"


def _card(name: str = "tiny") -> ModelCard:
    return ModelCard(
        name=name,
        created=1_700_000_000,
        max_model_len=512,
        max_request_tokens=512,
        vocab_size=300,
        eos_token_ids=(2,),
        tokenizer=blob_id(TOKENIZER),
        chat_template=blob_id(TEMPLATE.encode()),
    )


async def test_a_published_model_can_be_loaded_whole(redis: Redis) -> None:
    card = _card("org/model:v1")
    await publish_model(redis, card, TOKENIZER, TEMPLATE)

    assert await list_models(redis) == {"org/model:v1": card}
    assert await load_blob(redis, card.tokenizer) == TOKENIZER
    assert await load_blob(redis, card.chat_template) == TEMPLATE.encode()


async def test_a_card_that_names_other_contents_is_refused(redis: Redis) -> None:
    with pytest.raises(ValueError, match="does not name"):
        await publish_model(redis, _card(), b"other", TEMPLATE)
    assert await list_models(redis) == {}


async def test_a_heartbeat_keeps_both_cards_alive(redis: Redis) -> None:
    await publish_model(redis, _card(), TOKENIZER, TEMPLATE)
    await redis.pexpire(keys.model_key("tiny"), 50)
    await redis.pexpire(keys.blob_key(_card().tokenizer), 50)
    worker = WorkerCard(worker_id="w1", model="tiny", running=3)

    assert await heartbeat(redis, worker, _card())

    assert await list_workers(redis) == [worker]
    assert await redis.pttl(keys.model_key("tiny")) > 1000
    assert await redis.pttl(keys.blob_key(_card().tokenizer)) > 1000
    assert 0 < await redis.pttl(keys.worker_key("w1")) <= keys.WORKER_TTL_MS


async def test_silence_makes_models_and_workers_disappear(redis: Redis) -> None:
    await publish_model(redis, _card(), TOKENIZER, TEMPLATE)
    await heartbeat(redis, WorkerCard(worker_id="w1", model="tiny"), _card())
    await redis.delete(keys.model_key("tiny"), keys.worker_key("w1"))  # what their TTL does

    assert await list_models(redis) == {}
    assert await list_workers(redis) == []
    assert await redis.smembers(keys.models_key()) == set()


async def test_blobs_lost_in_a_flush_come_back_with_the_next_heartbeat(redis: Redis) -> None:
    await publish_model(redis, _card(), TOKENIZER, TEMPLATE)
    await redis.flushall()
    worker = WorkerCard(worker_id="w1", model="tiny")

    assert not await heartbeat(redis, worker, _card())  # not given: no model without its tokenizer
    assert await list_models(redis) == {}
    assert await heartbeat(redis, worker, _card(), [TOKENIZER, TEMPLATE.encode()])

    assert await list_models(redis) == {"tiny": _card()}
    assert await load_blob(redis, _card().tokenizer) == TOKENIZER


async def test_a_loading_worker_shows_itself_without_a_model(redis: Redis) -> None:
    assert await heartbeat(redis, WorkerCard(worker_id="w1", model="tiny", state="loading"), None)
    assert [worker.state for worker in await list_workers(redis)] == ["loading"]
    await withdraw_worker(redis, "w1")
    assert await list_workers(redis) == []


async def test_lost_and_damaged_blobs_are_errors_not_guesses(redis: Redis) -> None:
    with pytest.raises(ModelNotFound):
        await load_blob(redis, "0" * 64)
    await redis.set(keys.blob_key("0" * 64), b"other", px=1000)
    with pytest.raises(ModelNotFound):
        await load_blob(redis, "0" * 64)


async def test_a_card_of_another_version_does_not_hide_the_rest(redis: Redis) -> None:
    await publish_model(redis, _card(), TOKENIZER, TEMPLATE)
    await redis.set(keys.model_key("newer"), b"\xff\xff", px=1000)
    await redis.sadd(keys.models_key(), "newer")
    assert list(await list_models(redis)) == ["tiny"]
