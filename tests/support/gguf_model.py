"""Writes small GGUF files with the gguf library: from a tiny model's Hugging Face weights, or with any metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from tests.support.tiny_model import SPECIAL_TOKENS, random_weights, tiny_llama_config, tiny_tokenizer

__all__ = ["gguf_name", "make_tiny_gguf", "write_gguf"]

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Hugging Face tensor name -> GGUF's."""
    if name in _NAMES:
        return _NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def make_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    seed: int = 0,
    **config: Any,
) -> dict[str, Any]:
    """The model `make_tiny_llama` makes with the same arguments, as a GGUF file; returns its config.json fields.

    Matrices are stored as `kind`, or as what it says of their GGUF name. `metadata` adds keys or, with None, removes
    them.
    """
    full = tiny_llama_config(**config)
    weights = random_weights(full, seed)
    heads = {"q_proj": full["num_attention_heads"], "k_proj": full["num_key_value_heads"]}
    tensors = {}
    for name, tensor in weights.items():
        part = name.split(".")[-2]
        stored = _interleave(tensor, heads[part]) if architecture == "llama" and part in heads else tensor
        tensors[gguf_name(name)] = stored.float().numpy()
    values = _architecture_metadata(architecture, full) | _tokenizer_metadata() | dict(metadata or {})
    write_gguf(path, values, tensors | dict(extra_tensors or {}), kind)
    return full


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray[Any, Any]],
    kind: Kind | Callable[[str], Kind] = Kind.F32,
) -> None:
    """Any metadata (None values are left out) and tensors; matrices are quantised as `make_tiny_gguf` does."""
    writer = gguf.GGUFWriter(str(path), str(metadata.get("general.architecture", "llama")))
    for key, value in metadata.items():
        if key != "general.architecture" and value is not None:
            _add(writer, key, value)
    for name, array in tensors.items():
        own = kind if isinstance(kind, Kind) else kind(name)
        if array.ndim > 1 and own is not Kind.F32:
            writer.add_tensor(name, gguf.quantize(array, own), raw_dtype=own)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _interleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's permute of Q and K."""
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, 2, half, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape).contiguous()


def _architecture_metadata(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in fields.items()}


def _tokenizer_metadata() -> dict[str, Any]:
    tokenizer = json.loads(tiny_tokenizer().to_str())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in vocabulary],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
