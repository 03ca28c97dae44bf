"""Loading with quantised weights: what stays packed, what is converted, what the log says. Oracle: the same file in
floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine_worker.errors import LoadError
from engine_worker.models.base import LoadedModel
from engine_worker.models.loading.loader import load
from kernels.cpu.library import load as load_library
from tests.support.gguf_model import make_tiny_gguf
from tests.support.paged import PagedModel
from tests.support.tiny_model import make_tiny_llama

IDS = [5, 9, 200, 31, 31, 77, 2, 150, 8]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
CLOSE = 0.06
"""Activations in 8 bits, in every linear of a model that answers sharply."""
needs_native = pytest.mark.skipif(isinstance(load_library(), str), reason="no compiler for the native kernels")


def opened(path: Path, quantization: str, dtype: str = "bfloat16") -> LoadedModel:
    return load(str(path), dtype=dtype, device="cpu", quantization=quantization)


def logits(loaded: LoadedModel) -> torch.Tensor:
    return PagedModel(loaded.model).run([(0, IDS)])[0]


def distance(mine: LoadedModel, other: LoadedModel) -> float:
    """Of their logits, Euclidean, over the other's size. Two models with nothing in common are 1.4 apart."""
    a, b = logits(mine), logits(other)
    return float((a - b).norm() / b.norm())


@needs_native
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
def test_a_file_is_served_packed(tmp_path: Path, kind: str, tied: bool) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, kind=Kind[kind], tie_word_embeddings=tied, **SIZES)
    packed, full = opened(path, "auto"), opened(path, "none")
    kept = "q8_0" if kind.startswith("Q5") else kind.lower()
    assert packed.quantization == kept
    assert full.quantization == "none"
    bits = {"q4_0": 4.5, "q4_1": 5, "q8_0": 8.5}[kept]
    assert packed.weight_bytes == pytest.approx(full.weight_bytes * bits / 16, rel=0.05)
    assert packed.fingerprint != full.fingerprint
    assert distance(packed, full) < CLOSE


@needs_native
def test_parts_of_different_types_take_the_widest(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    kinds = {"attn_v": Kind.Q8_0, "ffn_gate": Kind.Q4_0, "ffn_down": Kind.F16, "token_embd": Kind.Q8_0}
    make_tiny_gguf(path, kind=lambda name: next((k for part, k in kinds.items() if part in name), Kind.Q4_1), **SIZES)
    packed, full = opened(path, "gguf"), opened(path, "none")
    assert packed.quantization == "q4_1, q8_0"
    assert distance(packed, full) < CLOSE


@needs_native
@pytest.mark.parametrize("quantization", ["int8", "q8_0", "q4_0", "q4_1"])
def test_a_directory_is_quantized_at_load(tmp_path: Path, quantization: str) -> None:
    path = make_tiny_llama(tmp_path / "m", **SIZES)
    packed, full = opened(path, quantization), opened(path, "none")
    assert packed.quantization == {"q4_0": "q4_0, q8_0", "q4_1": "q4_1, q8_0"}.get(quantization, quantization)
    assert packed.weight_bytes < full.weight_bytes * 0.6
    assert distance(packed, full) < (0.5 if quantization.startswith("q4") else CLOSE)
    assert opened(path, "auto").quantization == "none"


@needs_native
def test_a_quantization_by_name_means_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto is float32 for small models; who asks for int8 has asked for speed. What is named is kept."""
    monkeypatch.setattr("engine_worker.models.config._cpu_has_bfloat16", lambda: True)
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, kind=Kind.Q8_0, **SIZES)
    kept = {name: opened(path, name, dtype="auto") for name in ("auto", "gguf", "int8")}
    assert {name: (model.config.dtype, model.quantization) for name, model in kept.items()} == {
        "auto": ("float32", "none"),
        "gguf": ("bfloat16", "q8_0"),
        "int8": ("bfloat16", "int8"),
    }
    exact = opened(path, "gguf", dtype="float32")
    assert (exact.config.dtype, exact.quantization) == ("float32", "q8_0")
    assert distance(exact, kept["auto"]) < CLOSE


def test_torch_kernels_expand_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CPU_BACKEND", "torch")
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, kind=Kind.Q4_0, **SIZES)
    loaded = opened(path, "auto")
    assert loaded.quantization == "none (PyTorch's kernels multiply no quantised weights, so all are kept in full)"
    assert distance(loaded, opened(path, "none")) < 1e-6
    with pytest.raises(LoadError, match=r"--quantization int8 needs .*HEADRACE_CPU_BACKEND is torch"):
        opened(path, "int8")


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m", **SIZES)
    with pytest.raises(LoadError, match="holds no quantised weights"):
        opened(path, "gguf")
    with pytest.raises(LoadError, match="'int3' is unknown"):
        opened(path, "int3")


@needs_native
def test_a_matrix_that_a_format_cannot_hold_is_named(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m", hidden_size=40, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(LoadError, match=r"'lm_head' cannot be kept as q8_0: .*multiple of 32"):
        opened(path, "q8_0")
    assert opened(path, "int8").quantization == "int8"
