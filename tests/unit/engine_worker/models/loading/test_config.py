"""ModelConfig from both formats, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_worker.errors import LoadError
from engine_worker.layers.rope import RopeConfig
from engine_worker.models.config import ModelConfig, resolve_dtype
from engine_worker.models.loading.config_gguf import config_from_gguf
from engine_worker.models.loading.config_hf import config_from_hf
from engine_worker.models.loading.gguf_file import GgufFile
from tests.support.gguf_model import make_tiny_gguf
from tests.support.tiny_model import tiny_llama_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def hf(dtype: str = "float32", max_model_len: int | None = None, **fields: Any) -> ModelConfig:
    raw = {key: value for key, value in tiny_llama_config(**fields).items() if value is not ...}
    return config_from_hf(raw, dtype=dtype, device=CPU, max_model_len=max_model_len)


def from_gguf(path: Path, dtype: str = "float32", **arguments: Any) -> ModelConfig:
    make_tiny_gguf(path, **arguments)
    return config_from_gguf(GgufFile(path), dtype=dtype, device=CPU, max_model_len=None)


def test_fields_of_a_plain_llama() -> None:
    config = hf()
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        max_model_len=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0, 8),
        dtype="float32",
    )
    assert config.kv_bytes_per_token() == 2 * 2 * 2 * 8 * 4


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    gguf = from_gguf(tmp_path / "m.gguf")
    assert gguf == hf() or abs(gguf.rms_norm_eps - 1e-5) < 1e-12
    tied = from_gguf(tmp_path / "t.gguf", tie_word_embeddings=True)
    assert tied.tie_word_embeddings


def test_defaults_of_absent_fields() -> None:
    config = hf(num_key_value_heads=..., rms_norm_eps=..., rope_theta=..., tie_word_embeddings=..., attention_bias=...)
    assert (config.num_kv_heads, config.rms_norm_eps, config.rope.theta) == (4, 1e-6, 10000.0)
    assert not config.tie_word_embeddings
    assert not config.qkv_bias


def test_qwen2_has_biases_on_qkv_only() -> None:
    config = hf(architectures=["Qwen2ForCausalLM"], attention_bias=...)
    assert (config.qkv_bias, config.attention_output_bias) == (True, False)


@pytest.mark.parametrize("place", ["old", "new"])
def test_rope_scaling_in_its_old_and_new_place(place: str) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 256
    if place == "old":
        config = hf(rope_scaling=scaling, rope_theta=5e5)
    else:
        config = hf(rope_parameters=scaling | {"rope_theta": 5e5}, rope_theta=...)
    assert config.rope == RopeConfig(5e5, 8, "llama3", 8.0, 1.0, 4.0, 256)
    assert config.max_model_len == 512


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_stretched_positions_extend_the_window(kind: str) -> None:
    assert hf(rope_scaling={"type": kind, "factor": 4.0}).max_model_len == 2048


def test_a_sliding_window_caps_the_length() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    assert hf(**mistral, sliding_window=1024).max_model_len == 1024
    assert hf(**mistral, sliding_window=None).max_model_len == 32768
    assert hf(**mistral).max_model_len == 4096
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert hf(**qwen).max_model_len == 512
    assert hf(**qwen, use_sliding_window=True).max_model_len == 64


def test_a_requested_length_is_honoured_up_to_the_trained_one() -> None:
    assert hf(max_model_len=100).max_model_len == 100
    for length in (513, 0, -1):
        with pytest.raises(LoadError, match=f"max_model_len is {length}; this model allows 1 to 512"):
            hf(max_model_len=length)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPTBigCodeForCausalLM"]}, "'GPTBigCodeForCausalLM' is not supported. Supported: Llama"),
        ({"architectures": ...}, "names no architecture"),
        ({"hidden_size": ...}, "hidden_size is None, a positive integer is needed"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
    ],
)
def test_refuses_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        hf(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported. Supported in GGUF files: llama, qwen2"),
        ({"metadata": {"llama.block_count": None}}, r"llama\.block_count is None"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"metadata": {"split.count": 3}}, "one of 3 parts"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"metadata": {"llama.attention.head_count_kv": [1, 2]}}, r"head_count_kv is \[1, 2\]"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "cannot share 3"),
    ],
)
def test_gguf_refuses_by_key(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        from_gguf(tmp_path / "m.gguf", **arguments)


def test_gguf_rope_variants(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert from_gguf(tmp_path / "a.gguf", metadata=keys).rope == RopeConfig(10000.0, 8, "linear", 4.0)
    divisors = {"rope_freqs.weight": np.array([1, 2, 4, 8], dtype=np.float32)}
    assert from_gguf(tmp_path / "b.gguf", extra_tensors=divisors).rope.frequency_divisors == (1.0, 2.0, 4.0, 8.0)


def test_gguf_one_value_a_layer_all_alike_is_one_value(tmp_path: Path) -> None:
    assert from_gguf(tmp_path / "m.gguf", metadata={"llama.attention.head_count_kv": [2, 2]}).num_kv_heads == 2


@pytest.mark.parametrize(
    ("requested", "declared", "device", "expected"),
    [
        ("float32", "bfloat16", CPU, {"float32"}),
        ("float16", None, CPU, {"float16"}),
        ("auto", "float32", CPU, {"float32"}),
        ("auto", "bfloat16", CPU, {"bfloat16", "float32"}),
        ("auto", "float16", CPU, {"bfloat16", "float32"}),
        ("auto", None, CPU, {"bfloat16", "float32"}),
        ("auto", "float16", CUDA, {"float16"}),
        ("auto", None, CUDA, {"bfloat16"}),
        ("auto", "int8", CUDA, {"bfloat16"}),
    ],
)
def test_dtype_choice(requested: str, declared: str | None, device: torch.device, expected: set[str]) -> None:
    assert resolve_dtype(requested, declared, device) in expected


def test_an_unknown_dtype_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(LoadError, match=r"'int3' is unknown\. Allowed: auto, float32, bfloat16, float16"):
        resolve_dtype("int3", None, CPU)
