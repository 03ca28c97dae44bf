"""Perplexity of a fixed text under quantised weights, against the same checkpoint's weights in bfloat16 (real model).

The text is read twice: in one prefill, and a few tokens a step, because few rows take other kernels than many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from kernels.cpu.library import load as load_library
from tests.support.paged import PagedModel

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(400),
    pytest.mark.skipif(isinstance(load_library(), str), reason="no compiler for the native kernels"),
]

TEXT = Path(__file__).parents[3] / "data" / "prose.txt"
TOKENS = 1024
FEW_ROWS, FEW_TOKENS = 8, 512


class Reading(NamedTuple):
    many: torch.Tensor
    """Log-probabilities float32 [TOKENS, V], all tokens in one step."""
    few: torch.Tensor
    """The first FEW_TOKENS of them, FEW_ROWS tokens a step."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """torch's threads wait for each other all the time: beside any other process one is faster than two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def opened(quantization: str, kv_cache_dtype: str = "auto") -> LoadedModel:
    return load("", dtype="bfloat16", device="cpu", quantization=quantization, kv_cache_dtype=kv_cache_dtype)


def token_ids(loaded: LoadedModel) -> list[int]:
    ids: list[int] = Tokenizer.from_str(loaded.tokenizer_json.decode()).encode(TEXT.read_text("utf-8")).ids[:TOKENS]
    assert len(ids) == TOKENS
    return ids


def read(loaded: LoadedModel) -> Reading:
    ids = token_ids(loaded)
    many = PagedModel(loaded.model).run([(0, ids)])[0]
    paged = PagedModel(loaded.model)
    few = [paged.run([(0, ids[i : i + FEW_ROWS])])[0] for i in range(0, FEW_TOKENS, FEW_ROWS)]
    return Reading(many.log_softmax(-1), torch.cat(few).log_softmax(-1))


def rise(mine: torch.Tensor, wanted: torch.Tensor, ids: list[int]) -> float:
    """Relative rise of the perplexity of token i + 1 after tokens 0 … i."""
    targets = torch.tensor(ids[1 : len(mine)])
    return math.exp(float(F.nll_loss(mine[:-1], targets) - F.nll_loss(wanted[:-1], targets))) - 1


def divergence(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence from `wanted`, in nats. Steadier than the perplexity, where luck may help."""
    return float((wanted.exp() * (wanted - mine)).sum(-1).mean())


@pytest.fixture(scope="module")
def reference() -> tuple[Reading, list[int]]:
    loaded = opened("none")
    return read(loaded), token_ids(loaded)


@pytest.mark.parametrize(
    ("quantization", "formats", "most_rise", "most_divergence"),
    [("int8", "int8", 0.01, 0.01), ("gguf", "q4_1, q8_0", 0.03, 0.01), ("q8_0", "q8_0", 0.01, 0.01)],
)
def test_quantised_weights_keep_the_perplexity(
    reference: tuple[Reading, list[int]], quantization: str, formats: str, most_rise: float, most_divergence: float
) -> None:
    (wanted, ids), loaded = reference, opened(quantization)
    assert loaded.quantization == formats
    got = read(loaded)
    for mine, other in zip(got, wanted, strict=True):
        print(f"{quantization}: {rise(mine, other, ids):+.2%}, divergence {divergence(mine, other):.4f}")
        assert abs(rise(mine, other, ids)) < most_rise
        assert divergence(mine, other) < most_divergence


def test_an_int8_cache_keeps_the_perplexity(
    reference: tuple[Reading, list[int]], record_property: pytest.RecordProperty
) -> None:
    wanted, ids = reference
    mine = read(opened("none", "int8"))
    for name, got, expected in (("prefill", mine.many, wanted.many), ("few rows", mine.few, wanted.few)):
        up, nats = rise(got, expected, ids), divergence(got, expected)
        print(f"int8 cache, {name}: perplexity {up:+.3%}, divergence {nats:.5f} nats")
        assert abs(up) <= 0.01
        assert nats <= 0.01
