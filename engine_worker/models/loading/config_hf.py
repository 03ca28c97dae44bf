"""config.json of a Hugging Face checkpoint -> ModelConfig. Refuses what the engine would compute differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine_worker.errors import LoadError
from engine_worker.layers.rope import RopeConfig
from engine_worker.models.config import ModelConfig, resolve_dtype, resolve_length
from engine_worker.models.registry import model_class

__all__ = ["config_from_hf"]

_ACTIVATIONS = {"silu", "swish"}


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access with errors that name the field."""

    raw: Mapping[str, Any]

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LoadError(f"config.json: {name} is {value!r}, a positive integer is needed.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise LoadError(f"config.json: {name} is {value!r}, a positive number is needed.")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)


def config_from_hf(
    raw: Mapping[str, Any], *, dtype: str, device: torch.device, max_model_len: int | None
) -> ModelConfig:
    """`dtype` and `max_model_len` as the user asked for them. Raises LoadError naming the field."""
    fields = _Fields(raw)
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        raise LoadError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly.")
    positions = fields.integer("max_position_embeddings")
    rope, trained = _rope(raw, fields, head_dim, positions)
    qwen = architecture == "Qwen2ForCausalLM"
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=trained,
        max_model_len=resolve_length(_window(raw, architecture, trained), max_model_len),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        dtype=resolve_dtype(dtype, _declared_dtype(raw), device),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=qwen or fields.flag("attention_bias"),
        attention_output_bias=not qwen and fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise LoadError("config.json names no architecture (field architectures).")
    model_class(names[0])
    return names[0]


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise LoadError(f"config.json: the activation {activation!r} is not supported (silu is).")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise LoadError(f"The checkpoint is quantised ({method}); for quantised weights use a GGUF file.")


def _declared_dtype(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _window(raw: Mapping[str, Any], architecture: str, trained: int) -> int:
    """A sliding window is honoured by never serving past it, where it equals full attention."""
    if not raw.get("use_sliding_window", architecture != "Qwen2ForCausalLM"):
        return trained
    # A Mistral file that says nothing means 4096; null means no window.
    window = raw.get("sliding_window", 4096 if architecture == "MistralForCausalLM" else None)
    return trained if window is None else min(trained, int(window))


def _rope(raw: Mapping[str, Any], fields: _Fields, head_dim: int, positions: int) -> tuple[RopeConfig, int]:
    """The rope configuration, and the positions it reaches."""
    # Newer files keep everything in rope_parameters, older ones theta beside rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    own = _Fields(scaling)
    theta = own.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    share = own.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if kind == "default":
        return RopeConfig(theta, rotary_dim), positions
    if kind == "linear":
        factor = own.number("factor")
        return RopeConfig(theta, rotary_dim, kind, factor), int(positions * factor)
    if kind == "dynamic":
        factor = own.number("factor")
        original = own.integer("original_max_position_embeddings", positions)
        return RopeConfig(theta, rotary_dim, kind, factor, original_max_position=original), int(original * factor)
    if kind == "llama3":
        rope = RopeConfig(
            theta,
            rotary_dim,
            kind,
            own.number("factor"),
            own.number("low_freq_factor"),
            own.number("high_freq_factor"),
            own.integer("original_max_position_embeddings"),
        )
        return rope, positions
    raise LoadError(f"config.json: the rope type {kind!r} is not supported (default, linear, dynamic and llama3 are).")
