"""Logits over a paged cache against transformers, for every member of the family, in mixed batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.models.loading.loader import load
from tests.support.llama_oracle import greedy, hf_from_directory
from tests.support.paged import PagedModel
from tests.support.tiny_model import make_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-head": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim apart from hidden size": {"head_dim": 24},
    "nine heads over three": {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3},
    "rope linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope llama3": {"rope_scaling": LLAMA3},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
}


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(count)]


def reference_logits(hf: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_transformers_in_a_mixed_batch(tmp_path: Path, config: dict[str, Any]) -> None:
    path = make_tiny_llama(tmp_path / "model", **config)
    hf = hf_from_directory(path)
    paged = PagedModel(load(str(path), dtype="float32", device="cpu").model, block_size=4)
    sequences = [tokens(number, length) for number, length in enumerate((37, 1, 8, 70))]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    # Prompts in chunks of uneven size, joined by single decodes, until every sequence is through.
    chunks = [iter(sizes) for sizes in ([5, 1, 20, 1, 10], [1], [3, 4, 1], [33, 1, 1, 30, 5])]
    done = [0] * len(sequences)
    while any(position < len(ids) for position, ids in zip(done, sequences, strict=True)):
        step = []
        for number, ids in enumerate(sequences):
            size = next(chunks[number], 0)
            if size:
                step.append((number, ids[done[number] : done[number] + size]))
                done[number] += size
        for (number, _), logits in zip(step, paged.run(step), strict=True):
            parts[number].append(logits)
    for ids, logits in zip(sequences, parts, strict=True):
        assert logits[0].dtype is torch.float32
        torch.testing.assert_close(torch.cat(logits), reference_logits(hf, ids), rtol=1e-4, atol=2e-4)


def test_greedy_continuation_equals_generate(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model", eos_token_id=319)
    hf = hf_from_directory(path)
    paged = PagedModel(load(str(path), dtype="float32", device="cpu").model)
    prompt = tokens(7, 50)
    out: list[int] = []
    chunk = prompt
    while len(out) < 40:
        out.append(int(paged.run([(0, chunk)])[0][-1].argmax()))
        chunk = out[-1:]
    expected = greedy(hf, prompt, 40)
    # generate() may not draw EOS under min_new_tokens; compare up to the first one.
    end = out.index(319) if 319 in out else len(out)
    assert out[:end] == expected[:end]


def test_a_dynamic_window_within_the_trained_length_is_not_scaled(tmp_path: Path) -> None:
    path = make_tiny_llama(
        tmp_path / "model", rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=64
    )
    hf = hf_from_directory(path)
    paged = PagedModel(load(str(path), dtype="float32", device="cpu", max_model_len=64).model)
    ids = tokens(1, 60)
    torch.testing.assert_close(paged.run([(0, ids)])[0], reference_logits(hf, ids), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_within_two_percent_of_float32(tmp_path: Path, dtype: str) -> None:
    path = make_tiny_llama(tmp_path / "model", weight_scale=0.1)
    wide, narrow = (PagedModel(load(str(path), dtype=d, device="cpu").model) for d in ("float32", dtype))
    ids = tokens(3, 64)
    expected = wide.run([(0, ids)])[0]
    out = torch.cat([narrow.run([(0, ids[:40])])[0], narrow.run([(0, ids[40:])])[0]])
    assert float((out - expected).norm() / expected.norm()) < 2e-2


def test_logits_of_chosen_rows_only(tmp_path: Path) -> None:
    model = load(str(make_tiny_llama(tmp_path / "model")), dtype="float32", device="cpu").model
    hidden = torch.randn(5, model.config.hidden_size)
    full = model.compute_logits(hidden)
    torch.testing.assert_close(model.compute_logits(hidden[[1, 4]]), full[[1, 4]])
    assert full.shape == (5, model.config.vocab_size)
