"""`--batch-invariant` on the real model in bfloat16: a request's tokens and logits are the same bits alone, among
others, after preemption, after a take-over, with prefix hits, and however its prompt is cut into chunks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.errors import LoadError
from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from engine_worker.request import Klass, Request, TokenEvent
from tests.support.paged import PagedModel
from tests.support.requests import make_request

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

OUTPUT = 8
LENGTHS = [1, 16, 17, 70, 130, 260]
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 2.0}
SAMPLING: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 40},
    # Cold enough for tokens to come again, which is what penalties decide about.
    {"temperature": 0.3, **PENALTIES},
]
PENALISED = 3
ENOUGH_BLOCKS = 400


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[("none", "auto"), ("gguf", "int8")], ids=["bfloat16", "quantized"])
def loaded(request: pytest.FixtureRequest, _one_thread: None) -> LoadedModel:
    try:
        return load(
            "",
            dtype="bfloat16",
            device="cpu",
            quantization=request.param[0],
            kv_cache_dtype=request.param[1],
            batch_invariant=True,
        )
    except LoadError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[object, ...]
    """The best five of each position, which hang on every logit of it."""


def _prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(17, 49152) for _ in range(length)]


def _request(index: int, output: Sequence[int] = (), klass: Klass = "interactive", **changes: float) -> Request:
    return make_request(
        _prompt(LENGTHS[index]),
        OUTPUT,
        request_id=f"asked-{index}/0",
        seed=index,
        output=output,
        klass=klass,
        logprobs=5,
        **(SAMPLING[index % len(SAMPLING)] | changes),
    )


def _mates(count: int) -> list[Request]:
    rng = random.Random(99)
    return [
        make_request(_prompt(rng.randrange(2, 90)), rng.randrange(2, 30), request_id=f"mate-{i}/0", seed=i)
        for i in range(count)
    ]


def _engine(loaded: LoadedModel, *, blocks: int = ENOUGH_BLOCKS, budget: int = 512, caching: bool = False) -> Engine:
    return Engine(loaded, EngineConfig(num_blocks=blocks, max_num_batched_tokens=budget, enable_prefix_caching=caching))


def _run(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    """A request joins before every step, so that each meets others at every stage."""
    arrivals = iter(requests)
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    left = len(events)
    while left:
        if (request := next(arrivals, None)) is not None:
            engine.add(request)
        for event in engine.step():
            assert event.finish_reason in (None, "length")
            events[event.request_id].append(event)
            left -= event.finish_reason is not None
    return {
        name: Answer(tuple(e.token_id for e in own if e.token_id is not None), tuple(e.logprobs for e in own))
        for name, own in events.items()
        if name.startswith("asked")
    }


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for index in range(len(LENGTHS)):
        answers |= _run(_engine(loaded), [_request(index)])
    assert all(len(answer.tokens) == OUTPUT for answer in answers.values())
    without = dict.fromkeys(PENALTIES, 0.0) | {"repetition_penalty": 1.0}
    [free] = _run(_engine(loaded), [_request(PENALISED, **without)]).values()
    assert answers[f"asked-{PENALISED}/0"].tokens != free.tokens, "the penalties decide something"
    return answers


def _everyone() -> list[Request]:
    mates, asked = _mates(16), [_request(index) for index in range(len(LENGTHS))]
    return [request for pair in zip(asked, mates, strict=False) for request in pair] + mates[len(asked) :]


@pytest.mark.parametrize("budget", [24, 100, 512])
def test_among_sixteen_others_at_every_token_budget(loaded: LoadedModel, alone: dict[str, Answer], budget: int) -> None:
    assert _run(_engine(loaded, budget=budget), _everyone()) == alone


def test_after_preemption(loaded: LoadedModel, alone: dict[str, Answer]) -> None:
    """Batch requests lose their blocks to interactive ones that come while they run."""
    engine = _engine(loaded, blocks=20)
    asked = [_request(index, klass="batch") for index in (0, 1, 2, 3, 4)]
    urgent = [make_request(_prompt(250), 3, request_id=f"mate-{i}/0") for i in range(3)]
    answers = _run(engine, [*asked, *urgent])
    assert answers == {name: alone[name] for name in answers}
    assert engine.stats().counters["preemptions"] > 0


def test_with_prefix_hits(loaded: LoadedModel, alone: dict[str, Answer]) -> None:
    engine = _engine(loaded, caching=True)
    assert _run(engine, _everyone()) == alone
    before = engine.stats().counters["cached_tokens"]
    assert _run(engine, [_request(index) for index in range(len(LENGTHS))]) == alone
    assert engine.stats().counters["cached_tokens"] > before


@pytest.mark.parametrize("after", [1, 5])
def test_after_a_take_over(loaded: LoadedModel, alone: dict[str, Answer], after: int) -> None:
    resumed = [_request(index, output=alone[f"asked-{index}/0"].tokens[:after]) for index in range(len(LENGTHS))]
    answers = _run(_engine(loaded, budget=64), [*resumed, *_mates(4)])
    for name, answer in answers.items():
        assert answer.tokens == alone[name].tokens[after:]
        assert answer.logprobs == alone[name].logprobs[after:]


def test_logits_of_every_position_are_the_same_bits(loaded: LoadedModel) -> None:
    prompt, mate = _prompt(150), _prompt(90)
    [whole] = PagedModel(loaded.model).run([(0, prompt)])
    pieces = PagedModel(loaded.model, seed=1)
    got, cuts = [], [0, 1, 2, 40, 104, 105, 149, 150]
    for start, end in itertools.pairwise(cuts):
        got.append(pieces.run([(5, mate[start % 7 : start % 7 + 3]), (0, prompt[start:end]), (6 + start, mate)])[1])
    assert torch.equal(torch.cat(got), whole)
