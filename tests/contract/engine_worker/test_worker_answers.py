"""A whole worker on the tiny model and a real Redis: what its logs say."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest
from redis.asyncio import Redis
from tokenizers import Tokenizer

from engine_worker.models.base import LoadedModel
from shared.messages import GenerateRequest, Usage
from shared.params import SamplingParams, StopConditions
from shared.queue import RequestQueue
from tests.support.records import make_request
from tests.support.wait import eventually
from tests.support.workers import ask, finished, running_worker, submit, until_logged

GREEDY = SamplingParams(temperature=0.0)


def decode(tiny: LoadedModel, tokens: list[int]) -> str:
    return Tokenizer.from_str(tiny.tokenizer_json.decode()).decode(tokens)


def with_stop(request: GenerateRequest, **changes: object) -> GenerateRequest:
    """The same request under a new id with other stop conditions."""
    fresh = make_request(prompts=request.prompts, sampling=request.sampling)
    return msgspec.structs.replace(fresh, stop=replace(request.stop, **changes))


async def test_an_answer_is_text_of_its_tokens_with_one_terminal_record(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny) as running:
        answer = await ask(redis, make_request(max_tokens=24))
        assert len(answer.tokens()) == 24
        assert answer.text() == decode(tiny, answer.tokens())
        assert (answer.last().finish_reason, answer.last().stop_reason) == ("length", None)
        assert answer.end.code == ""
        assert answer.end.usage == Usage(prompt_tokens=4, completion_tokens=24)
        assert running.engine.stats().blocks_used == 0


async def test_seeded_choices_are_independent_of_n_and_of_neighbours(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=42)
    async with running_worker(redis_url, tiny):
        one = await ask(redis, make_request(sampling=sampling))
        crowd = [make_request(sampling=SamplingParams(seed=seed)) for seed in range(12)]
        both = make_request(sampling=sampling, n=2)
        for request in (*crowd, both):
            await submit(redis, request)
        answer = await finished(redis, both.rid)
        assert answer.tokens(0) == one.tokens()
        assert answer.tokens(1) != one.tokens()
        assert answer.text(1) == decode(tiny, answer.tokens(1))
        assert answer.end.usage == Usage(
            prompt_tokens=4, completion_tokens=len(answer.tokens(0)) + len(answer.tokens(1))
        )
        for request in crowd:
            assert (await finished(redis, request.rid)).end.code == ""


async def test_usage_tells_what_was_cached_and_salts_keep_caches_apart(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    prompts = (tuple(range(5, 45)),)
    async with running_worker(redis_url, tiny):
        told = [
            (await ask(redis, make_request(prompts=prompts, n=n, cache_salt=salt))).end.usage.cached_tokens
            for salt, n in (("", 1), ("", 1), ("a", 3), ("a", 3), ("b", 1), ("", 2))
        ]
    assert told == [0, 32, 0, 32, 0, 32]


async def test_several_prompts_each_equal_their_solo_run(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    prompts = ((5, 6, 7), (9, 8), (30, 31, 32, 33))
    async with running_worker(redis_url, tiny):
        solo = [await ask(redis, make_request(prompts=(prompt,))) for prompt in prompts]
        together = await ask(redis, make_request(prompts=prompts, n=2))
        for i, answer in enumerate(solo):
            assert together.tokens(2 * i) == together.tokens(2 * i + 1) == answer.tokens()
        assert together.end.usage.prompt_tokens == 9


async def test_stp_01_stp_10_a_stop_string_ends_text_tokens_and_engine(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    base = make_request(max_tokens=200)
    async with running_worker(redis_url, tiny, fault="step-delay-ms:2") as running:
        free = await ask(redis, with_stop(base, max_tokens=40))
        stop = free.text()[10:14]
        position = free.text().find(stop)
        stopped = await ask(redis, with_stop(base, stop=(stop, "never")))
        assert stopped.text() == free.text()[:position]
        assert (stopped.last().finish_reason, stopped.last().stop_reason) == ("stop", stop)
        used = next(k for k in range(41) if stop in decode(tiny, free.tokens()[:k]))
        assert stopped.tokens() == free.tokens()[:used]
        assert stopped.end.usage.completion_tokens == used

        included = await ask(redis, with_stop(base, stop=(stop,), include_stop_str_in_output=True))
        assert included.text() == free.text()[: position + len(stop)]

        generated = running.engine.stats().counters["generation_tokens"]
        assert generated <= 2 + 40 + 2 * (used + 8), "the engine must end with the stop string"


async def test_rl_23_a_stop_that_never_completes_costs_no_text(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    base = make_request()
    async with running_worker(redis_url, tiny):
        whole = await ask(redis, with_stop(base, max_tokens=20))
        requests = [
            with_stop(base, max_tokens=count, stop=(decode(tiny, whole.tokens()[:count])[-2:] + "§",))
            for count in range(1, 21)
        ]
        for request in requests:
            await submit(redis, request)
        for count, request in enumerate(requests, 1):
            answer = await finished(redis, request.rid)
            assert answer.text() == decode(tiny, whole.tokens()[:count])
            assert answer.last().finish_reason == "length"


async def test_det_06_the_stop_tokens_text_is_not_shown_and_its_id_named_when_asked_for(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny):
        eos = await ask(redis, make_request(sampling=replace(GREEDY, logit_bias={2: 100.0})))
        assert (eos.text(), eos.last().finish_reason, eos.last().stop_reason) == ("", "stop", None)
        assert eos.end.usage.completion_tokens == 1

        forced = make_request(sampling=replace(GREEDY, logit_bias={65: 100.0}))
        own = await ask(redis, with_stop(forced, stop_token_ids=(65,)))
        assert (own.text(), own.last().finish_reason, own.last().stop_reason) == ("", "stop", 65)

        ignored = make_request(sampling=replace(GREEDY, logit_bias={2: 100.0}))
        on = await ask(redis, with_stop(ignored, ignore_eos=True, max_tokens=5))
        assert (on.text(), on.tokens(), on.last().finish_reason) == ("", [2] * 5, "length")
        shown = make_request(sampling=replace(GREEDY, logit_bias={2: 100.0}))
        answer = await ask(redis, with_stop(shown, ignore_eos=True, max_tokens=2, skip_special_tokens=False))
        assert answer.text() == "<|im_end|>" * 2


async def test_lgp_07_each_token_has_its_own_logprobs(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    async with running_worker(redis_url, tiny):
        answer = await ask(redis, make_request(sampling=replace(GREEDY, logprobs=2)))
        logprobs = [item for delta in answer.deltas() for item in delta.logprobs]
        assert [item.token_id for item in logprobs] == answer.tokens()
        assert all(len(item.top) == 2 and -9999.0 <= item.logprob <= 0.0 for item in logprobs)
        assert all(item.top[0][0] == item.token_id for item in logprobs)  # greedy takes the best


async def test_max_tokens_beyond_the_window_ends_at_the_window(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    async with running_worker(redis_url, tiny, max_model_len=24):
        answer = await ask(redis, make_request(max_tokens=1000))
        assert len(answer.tokens()) == 20
        assert answer.last().finish_reason == "length"


async def test_max_tokens_zero_ends_at_once(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    async with running_worker(redis_url, tiny):
        answer = await ask(redis, make_request(max_tokens=0, n=2))
        assert (answer.tokens(0), answer.last(0).finish_reason, answer.last(1).finish_reason) == (
            [],
            "length",
            "length",
        )
        assert answer.end.usage == Usage(prompt_tokens=4)


async def test_a_request_of_more_choices_than_slots_queues_inside_the_engine(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny, max_num_seqs=2):
        small, big = make_request(), make_request(n=7)
        await submit(redis, small)
        await submit(redis, big)
        answer = await finished(redis, big.rid)
        expected = (await finished(redis, small.rid)).tokens()
        assert [answer.tokens(i) for i in range(7)] == [expected] * 7


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompts": (tuple(range(1, 200)) * 3,)}, "context_length_exceeded"),
        ({"prompts": ((1, 2, 99_999),)}, "invalid_value"),
        ({"prompts": ((1, 2), ())}, "invalid_value"),
        ({"sampling": SamplingParams(logit_bias={-1: 1.0})}, "invalid_value"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "invalid_value"),
        ({"stop": StopConditions(max_tokens=4, stop_token_ids=(60_001,))}, "invalid_value"),
        ({"stop": StopConditions(max_tokens=4, stop=("",))}, "invalid_value"),
        ({"n": 0}, "invalid_value"),
    ],
)
async def test_stp_07_what_no_pod_should_have_let_through_ends_with_an_error_and_harms_nobody(
    redis: Redis, redis_url: str, tiny: LoadedModel, changes: dict[str, object], code: str
) -> None:
    async with running_worker(redis_url, tiny):
        before = await ask(redis, make_request())
        bad = await ask(redis, make_request(**changes))
        assert (bad.end.code, bad.end.usage.completion_tokens) == (code, 0)
        assert bad.end.message
        after = await ask(redis, make_request())
        assert after.tokens() == before.tokens()


async def test_a_cancelled_request_ends_with_abort_and_its_true_usage(
    redis: Redis, redis_url: str, tiny: LoadedModel
) -> None:
    async with running_worker(redis_url, tiny, fault="step-delay-ms:5") as running:
        neighbour, request = make_request(max_tokens=60), make_request(max_tokens=400, n=2)
        await submit(redis, neighbour)
        await submit(redis, request)
        await until_logged(redis, request.rid, 3)
        await RequestQueue(redis).cancel(request.rid)
        answer = await finished(redis, request.rid)
        assert {answer.last(0).finish_reason, answer.last(1).finish_reason} == {"abort"}
        tokens = len(answer.tokens(0)) + len(answer.tokens(1))
        assert answer.end.usage == Usage(prompt_tokens=4, completion_tokens=tokens)
        assert tokens < 400
        steps = running.engine.stats().steps
        await eventually(lambda: running.engine.stats().running == 1)
        assert running.engine.stats().steps <= steps + 2
        assert len((await finished(redis, neighbour.rid)).tokens()) == 60


async def test_many_requests_at_once_all_end(redis: Redis, redis_url: str, tiny: LoadedModel) -> None:
    async with running_worker(redis_url, tiny, max_num_seqs=4) as running:
        requests = [make_request(max_tokens=3 + i % 5, klass=("interactive", "batch")[i % 2]) for i in range(40)]
        await asyncio.gather(*(submit(redis, request) for request in requests))
        for request in requests:
            assert len((await finished(redis, request.rid)).tokens()) == request.stop.max_tokens
        await eventually(lambda: running.engine.stats().blocks_used == 0)
        running.engine.check_integrity()
