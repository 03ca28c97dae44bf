"""The engine on the real model against transformers' own generate, one request at a time on the same weights.

A token may differ only where the reference's two best logits are closer than MARGIN; such ties are counted and
reported, and what follows one is not compared, because from there on the two read different texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from tests.support.paged import PagedModel
from tests.support.requests import make_request

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(400)]

NUM_PROMPTS = 48
LONGEST = 700
OUTPUT = 8
MARGIN = 1e-4


@dataclass(frozen=True)
class Reference:
    prompt: list[int]
    tokens: list[int]
    margins: list[float]
    """Distance of the two best logits at each position."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch's threads wait for each other all the time: beside any other process one is faster than two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("", dtype="float32", device="cpu", max_model_len=None)


@pytest.fixture(scope="module")
def references(reference: Any) -> list[Reference]:
    rng = random.Random(11)
    ratio = LONGEST ** (1 / (NUM_PROMPTS - 1))
    lengths = [max(1, round(ratio**i)) for i in range(NUM_PROMPTS)]
    rng.shuffle(lengths)
    assert min(lengths) == 1
    assert max(lengths) == LONGEST
    with _one_thread():
        return [_reference(reference, [rng.randrange(17, 49152) for _ in range(length)]) for length in lengths]


def _reference(peer: Any, prompt: list[int]) -> Reference:
    ids = torch.tensor([prompt])
    out = peer.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=OUTPUT,
        min_new_tokens=OUTPUT,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].topk(2).values for logits in out.logits]
    tokens = [int(token) for token in out.sequences[0, len(prompt) :]]
    return Reference(prompt, tokens, [float(pair[0] - pair[1]) for pair in best])


CONFIGS = {
    "default": {},
    "block-1": {"block_size": 1},
    "block-32": {"block_size": 32},
    "budget-16": {"max_num_batched_tokens": 16},
    "budget-64": {"max_num_batched_tokens": 64},
    "budget-2048": {"max_num_batched_tokens": 2048},
    "seqs-1": {"max_num_seqs": 1},
    "seqs-3": {"max_num_seqs": 3},
    "smallest": {"block_size": 1, "max_num_batched_tokens": 16, "max_num_seqs": 3},
}


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS.keys())
def test_greedy_float32_equals_generate(
    loaded: LoadedModel, references: list[Reference], overrides: dict[str, int], record_property: Any
) -> None:
    values: dict[str, Any] = {"block_size": 16, "max_num_seqs": NUM_PROMPTS, "enable_prefix_caching": False}
    engine = Engine(loaded, EngineConfig(**(values | overrides)))
    outputs = _run_staggered(engine, [reference.prompt for reference in references])

    ties = sum(_compare(reference, tokens) for reference, tokens in zip(references, outputs, strict=True))

    record_property("ties", ties)
    print(f"{ties} of {NUM_PROMPTS} prompts left the reference at a tie below {MARGIN}")
    engine.check_integrity()
    assert engine.stats().blocks_used == 0


def _run_staggered(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """A request joins before every step, so most of them meet others at every stage."""
    arrivals: Iterator[tuple[int, list[int]]] = iter(enumerate(prompts))
    outputs: list[list[int]] = [[] for _ in prompts]
    left = len(prompts)
    while left:
        if (arrival := next(arrivals, None)) is not None:
            index, prompt = arrival
            engine.add(make_request(prompt, OUTPUT, request_id=f"{index}/0"))
        for event in engine.step():
            index = int(event.request_id.split("/")[0])
            assert event.finish_reason in (None, "length")
            if event.token_id is not None:
                outputs[index].append(event.token_id)
            left -= event.finish_reason is not None
        engine.check_integrity()
    return outputs


def _compare(reference: Reference, tokens: list[int]) -> bool:
    """Whether they part at a tie. Fails when they part anywhere else."""
    assert len(tokens) == OUTPUT
    for position, (ours, theirs) in enumerate(zip(tokens, reference.tokens, strict=True)):
        if ours != theirs:
            margin = reference.margins[position]
            assert margin < MARGIN, (
                f"prompt of {len(reference.prompt)} tokens, output {position}: {ours}, not {theirs}, margin {margin}"
            )
            return True
    return False


TEXTS = [
    "The history of the steam engine begins long before the railways. In the first century, Hero of Alexandria wrote "
    "of a small device that turned by jets of steam, and for many centuries nothing came of it.",
    "<|im_start|>user\nWrite a short haiku about Python programming.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "In 1969 the first message was sent from one computer to another over a network of four machines.",
]


def test_bfloat16_stays_close_to_float32(reference: Any) -> None:
    """Logits of a text within 2e-2 of float32's (Euclidean norm, relative), and the same top token wherever its margin
    is larger than the error."""
    loaded = load("", dtype="bfloat16", device="cpu", max_model_len=None)
    tokenizer = Tokenizer.from_str(loaded.tokenizer_json.decode())
    for text in [*TEXTS, "\n\n".join(TEXTS)]:
        prompt = tokenizer.encode(text).ids
        with torch.inference_mode():
            wide = reference(torch.tensor([prompt])).logits[0]
        [narrow] = PagedModel(loaded.model).run([(0, prompt)])
        assert float((narrow - wide).norm() / wide.norm()) <= 2e-2
        error = (narrow - wide).abs().amax(-1)
        best = wide.topk(2, dim=-1)
        clear = best.values[:, 0] - best.values[:, 1] > 2 * error
        assert int(clear.sum()) > len(prompt) // 3
        assert bool((narrow.argmax(-1)[clear] == best.indices[:, 0][clear]).all())
