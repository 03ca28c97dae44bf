"""A job without Redis or engine: events in, records out."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from engine_worker.jobs import Job
from engine_worker.request import FinishReason, PromptLogprobs, TokenEvent, TokenLogprobs
from shared.claims import Claim
from shared.messages import GenerateRequest, Reading, Record, Usage, decode_record
from shared.params import SamplingParams, StopConditions, choice_seed
from shared.text.token_bytes import TokenBytes
from tests.support import toy_tokenizers
from tests.support.records import make_request

TOKENIZER = toy_tokenizers.byte_level()
TOKENS = TokenBytes.from_tokenizer_json(TOKENIZER.to_str().encode())


def make_job(epoch: int = 1, **changes: Any) -> Job:
    request: GenerateRequest = make_request(**changes)
    return Job(Claim(request.rid, b"1-0", "queue", epoch), request, TOKENS)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def say(job: Job, text: str, index: int = 0, finish: FinishReason | None = None) -> list[str]:
    """The engine draws the tokens of `text`; `finish` comes with the last. Returns engine ids to abort."""
    aborted: list[str] = []
    tokens = ids(text)
    for token in tokens:
        choice = job.choices[index]
        reason = finish if token is tokens[-1] else None
        aborted += job.take(choice, TokenEvent(choice.engine_id, token, finish_reason=reason))
    return aborted


def records(job: Job) -> list[Record]:
    job.seal()
    return [decode_record(payload) for payload in job.records]


def test_what_others_ran_goes_first_by_age_and_the_new_ones_in_the_order_in_which_they_were_taken() -> None:
    request = make_request()
    places = []
    for entry, epoch in ((b"999-3", 4), (b"1000-2", 2), (b"1000-10", 3), (b"1796005039305-1", 2), (b"998-0", 1)):
        [runnable] = Job(Claim(request.rid, entry, "queue", epoch), request, TOKENS).engine_requests(100, [])
        places.append(runnable.arrival)
    assert places == sorted(set(places))
    assert places[-2] < places[-1] == 0


def test_what_comes_between_two_rounds_is_one_record() -> None:
    job = make_job(n=2)
    say(job, "Hello", 0)
    say(job, "wor", 1)
    say(job, " there", 0)
    (record,) = records(job)
    assert [(delta.index, delta.text) for delta in record.deltas] == [(0, "Hello there"), (1, "wor")]
    assert job.seal() == 0
    assert len(job.records) == 1


def test_the_end_comes_when_the_last_choice_has_ended_with_usage_over_all() -> None:
    job = make_job(n=2)
    say(job, "abc", 0, "length")
    first = records(job)
    assert first[-1].end is None
    say(job, "a", 1, "stop")
    last = records(job)[-1]
    assert last.end is not None
    assert last.end.usage == Usage(prompt_tokens=4, completion_tokens=len(ids("abc")) + len(ids("a")))
    assert [commit.end for commit in job.unsent(10)] == [False, True]
    assert job.unsent(10)[-1].completion_tokens == last.end.usage.completion_tokens


def test_a_stop_string_ends_the_choice_and_asks_for_the_engines_end() -> None:
    job = make_job(stop=StopConditions(max_tokens=99, stop=("ld wo",)))
    aborted = say(job, " world world world")
    (record,) = records(job)
    assert aborted == [job.choices[0].engine_id]
    assert (record.deltas[0].text, record.deltas[0].stop_reason) == (" wor", "ld wo")
    assert job.usage().completion_tokens == len(record.deltas[0].token_ids) < len(ids(" world world world"))


def test_a_stop_string_completed_by_the_last_token_needs_no_abort() -> None:
    job = make_job(stop=StopConditions(max_tokens=1, stop=("b",)))
    assert say(job, "b", finish="length") == []
    (delta,) = records(job)[0].deltas
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "b")


def test_what_the_engine_says_after_a_cancellation_is_not_counted() -> None:
    job = make_job()
    say(job, "abc")
    assert job.cancel() == [job.choices[0].engine_id]
    say(job, "def", finish="length")
    last = records(job)[-1]
    assert last.deltas[0].finish_reason == "abort"
    assert last.end is not None
    assert last.end.usage.completion_tokens == len(ids("abc"))
    assert job.cancel() == []


def test_a_failed_choice_ends_the_whole_job_with_its_error() -> None:
    job = make_job(n=2)
    say(job, "ab", 1)
    choice = job.choices[0]
    event = TokenEvent(choice.engine_id, finish_reason="error", error_code="engine_failure", error_message="broken")
    assert job.take(choice, event) == [job.choices[1].engine_id]
    (record,) = records(job)
    assert record.end is not None
    assert (record.end.code, record.end.message) == ("engine_failure", "broken")
    assert [delta.finish_reason for delta in record.deltas] == ["error", "error"]


def test_impossible_logprobs_are_finite_on_the_wire() -> None:
    job = make_job()
    logprobs = TokenLogprobs(-0.5, ((5, -0.5), (6, float("-inf"))))
    job.take(job.choices[0], TokenEvent(job.choices[0].engine_id, 5, logprobs))
    (delta,) = records(job)[0].deltas
    assert delta.logprobs[0].top == ((5, -0.5), (6, -9999.0))


def test_cached_tokens_count_each_prompt_once_and_never_more_than_it_has() -> None:
    job = make_job(prompts=((1, 2, 3), (4, 5)), n=2)
    for choice, cached in zip(job.choices, (2, 3, 9, 2), strict=True):
        event = TokenEvent(choice.engine_id, 7, finish_reason="length", num_cached_tokens=cached)
        job.take(choice, event)
    assert job.usage() == Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=2 + 2)


def test_engine_requests_carry_all_that_matters_of_each_choice() -> None:
    job = make_job(
        prompts=((1, 2, 3), (4, 5)),
        n=2,
        sampling=SamplingParams(seed=9),
        stop=StopConditions(max_tokens=50, stop_token_ids=(7,)),
        klass="batch",
        priority=-4,
        cache_salt="tenant a",
    )
    requests = job.engine_requests(10, [2, 3])
    assert [request.seed for request in requests] == [9, choice_seed(9, 1)] * 2
    assert [request.max_tokens for request in requests] == [7, 7, 8, 8]
    assert {request.stop_token_ids for request in requests} == {frozenset({2, 3, 7})}
    assert {(request.klass, request.priority) for request in requests} == {("batch", -4)}
    assert {request.cache_salt for request in requests} == {"tenant a"}, "or tenants would find each other's prefixes"
    assert len({request.request_id for request in requests}) == 4


def test_ignore_eos_leaves_only_the_clients_stop_ids() -> None:
    job = make_job(stop=StopConditions(max_tokens=5, stop_token_ids=(7,), ignore_eos=True))
    (request,) = job.engine_requests(100, [2])
    assert request.stop_token_ids == {7}


@pytest.mark.parametrize("logged", range(1, 9))
def test_a_replayed_job_continues_as_the_first_would_have(logged: int) -> None:
    text = " world 日本 wor🫠ld"
    tokens = ids(text)
    stop = StopConditions(max_tokens=99, stop=("ld!", "🫠x"))
    first = make_job(stop=stop)
    for token in tokens:
        first.take(first.choices[0], TokenEvent(first.choices[0].engine_id, token))
        first.seal()
    second = make_job(epoch=2, stop=stop)
    second.replay(first.records[:logged], map(decode_record, first.records[:logged]))
    (request,) = second.engine_requests(1000, [])
    assert request.output_token_ids == tokens[:logged]
    for token in tokens[logged:]:
        second.take(second.choices[0], TokenEvent(second.choices[0].engine_id, token))
        second.seal()
    assert second.records == first.records
    assert [commit.seq for commit in second.unsent(99)] == list(range(logged, len(tokens)))


def test_a_replay_does_not_start_choices_that_ended_and_counts_their_tokens() -> None:
    first = make_job(n=2)
    say(first, "abc", 0, "stop")
    first.seal()
    second = make_job(epoch=2, n=2)
    second.replay(first.records, map(decode_record, first.records))
    assert [request.request_id for request in second.engine_requests(100, [])] == [second.choices[1].engine_id]
    say(second, "x", 1, "length")
    end = records(second)[-1].end
    assert end is not None
    assert end.usage.completion_tokens == len(ids("abc")) + len(ids("x"))


def test_a_log_that_does_not_fit_the_request_is_refused() -> None:
    first = make_job(n=3)
    say(first, "abc", 2)
    first.seal()
    with pytest.raises(ValueError, match="choice 2 of 1"):
        make_job(epoch=2).replay(first.records, map(decode_record, first.records))


def test_engine_ids_of_two_acquisitions_differ() -> None:
    request = make_request()
    ids_ = {Job(Claim(request.rid, b"1-0", "q", epoch), request, TOKENS).choices[0].engine_id for epoch in (1, 2)}
    assert len(ids_) == 2


def test_a_take_over_scores_only_what_was_not_logged() -> None:
    """Half of the prompt's log-probabilities are in the log: the next worker's engine goes on after them."""
    request = {"sampling": SamplingParams(logprobs=0, prompt_logprobs=1), "max_tokens": 0}
    job = make_job(**request)
    score = PromptLogprobs(2, -0.5, 1, ((2, -0.5),))
    job.take(job.choices[0], TokenEvent(job.choices[0].engine_id, prompt_logprobs=(score, score)))
    [record] = records(job)
    assert [(s.token_id, s.rank, s.top) for s in record.deltas[0].prompt] == [(2, 1, ((2, -0.5),))] * 2
    later = make_job(epoch=2, **request)
    later.replay(job.records, [record])
    [left] = later.engine_requests(100, [])
    assert (left.num_scored, left.max_tokens) == (2, 0)
    later.take(later.choices[0], TokenEvent(left.request_id, prompt_logprobs=(score,), finish_reason="length"))
    assert later.engine_requests(100, []) == []
    assert [len(r.deltas[0].prompt) for r in records(later)] == [2, 1]


def test_the_stop_tokens_own_logprob_is_logged_for_those_who_score_prompts() -> None:
    for scores, entries in ((None, 0), (1, 1)):
        job = make_job(sampling=SamplingParams(logprobs=0, prompt_logprobs=scores))
        told = TokenLogprobs(-0.1, ())
        event = TokenEvent(job.choices[0].engine_id, 7, told, finish_reason="stop", stop_token_id=7)
        job.take(job.choices[0], event)
        assert len(records(job)[0].deltas[0].logprobs) == entries


def test_an_embedding_is_logged_as_float32_with_the_end() -> None:
    job = make_job(pooling="last", kind="embedding", max_tokens=0)
    [asked] = job.engine_requests(100, [])
    assert (asked.pooling, asked.max_tokens) == ("last", 0)
    job.take(job.choices[0], TokenEvent(asked.request_id, finish_reason="stop", embedding=(0.6, -0.8)))
    [record] = records(job)
    assert struct.unpack("<2f", record.deltas[0].embedding) == pytest.approx((0.6, -0.8))
    assert record.end is not None


def test_rl_16_each_choice_gets_a_matcher_and_the_tokens_to_replay() -> None:
    made: list[tuple[int, object]] = []

    def new_matcher(max_tokens: int) -> Any:
        made.append((max_tokens, object()))
        return made[-1]

    job = make_job(n=2)
    first, second = job.engine_requests(64, (2,), new_matcher)
    assert [first.matcher, second.matcher] == made
    assert [max_tokens for max_tokens, _ in made] == [first.max_tokens, second.max_tokens]
    assert 2 in first.stop_token_ids


def test_reasoning_tokens_are_told_with_the_records_and_in_the_usage_also_after_a_take_over() -> None:
    text, open_end = "<think>Hm, so</think>Yes", "<think>a"
    reasoning = len(ids("<think>Hm, so</think>"))
    assert ids(text)[:reasoning] == ids("<think>Hm, so</think>")
    job = make_job(n=2, reading=Reading(think="maybe"))
    for cut in range(len(ids(text))):
        first = job.choices[0]
        job.take(first, TokenEvent(first.engine_id, ids(text)[cut]))
        job.seal()
    say(job, open_end, 1, "length")
    told = [delta for record in records(job) for delta in record.deltas]
    assert sum(delta.reasoning for delta in told if delta.index == 0) == reasoning
    assert sum(delta.reasoning for delta in told if delta.index == 1) == len(ids(open_end))
    assert job.usage().reasoning_tokens == reasoning + len(ids(open_end))
    for logged in range(1, len(job.records)):
        again = make_job(2, n=2, reading=Reading(think="maybe"))
        again.replay(job.records[:logged], records(job)[:logged])
        known = again.choices[0].reasoning_tokens + again.choices[1].reasoning_tokens
        assert known == sum(delta.reasoning for record in records(job)[:logged] for delta in record.deltas)
