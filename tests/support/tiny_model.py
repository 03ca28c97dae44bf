"""A tiny random-weight Llama as a Hugging Face directory: config.json, model.safetensors, tokenizer.json, chat
template.

Deterministic: the same arguments give the same bytes. Small enough (about 100 kB) that a test makes its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["CHAT_TEMPLATE", "EOS_TOKEN_ID", "SPECIAL_TOKENS", "make_tiny_llama", "tiny_llama_config", "tiny_tokenizer"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today?",
    "user\nassistant\nsystem\nYou are a helpful assistant.",
    "One two three four five six seven eight nine ten; the end of the line and the start of the next.",
]


def tiny_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """Byte-level BPE that can write any text: 3 special tokens, 256 bytes, and merges up to `vocab_size`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return tokenizer


def tiny_llama_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the tiny model; `overrides` replace or add fields."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    } | overrides


def make_tiny_llama(directory: Path | str, *, seed: int = 0, weight_scale: float = 0.2, **config: Any) -> Path:
    """Writes the model into `directory` (made if missing) and returns it.

    Keyword arguments override config.json fields. The weights' spread is wide enough that greedy continuations vary.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    full = tiny_llama_config(**config)
    save_file(random_weights(full, seed, weight_scale), str(path / "model.safetensors"), metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(full, indent=2))
    tokenizer = tiny_tokenizer()
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    names = {"bos_token": SPECIAL_TOKENS[1], "eos_token": SPECIAL_TOKENS[2], "unk_token": SPECIAL_TOKENS[0]}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **names}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    generation = {"bos_token_id": 1, "eos_token_id": full["eos_token_id"]}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2))
    return path


def random_weights(config: dict[str, Any], seed: int = 0, scale: float = 0.2) -> dict[str, torch.Tensor]:
    """Hugging Face names -> tensors in the config's dtype, drawn from a normal distribution (norms around 1)."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.get("torch_dtype") or config.get("dtype") or "float32")

    def draw(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale + mean).to(dtype)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden)}
    qwen = config["model_type"] == "qwen2"
    linears = [
        ("self_attn.q_proj", q, hidden, config.get("attention_bias") or qwen),
        ("self_attn.k_proj", kv, hidden, config.get("attention_bias") or qwen),
        ("self_attn.v_proj", kv, hidden, config.get("attention_bias") or qwen),
        ("self_attn.o_proj", hidden, q, config.get("attention_bias") and not qwen),
        ("mlp.gate_proj", inner, hidden, config.get("mlp_bias")),
        ("mlp.up_proj", inner, hidden, config.get("mlp_bias")),
        ("mlp.down_proj", hidden, inner, config.get("mlp_bias")),
    ]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, bias in linears:
            weights[f"{prefix}{name}.weight"] = draw(rows, columns)
            if bias:
                weights[f"{prefix}{name}.bias"] = draw(rows)
        weights[f"{prefix}input_layernorm.weight"] = draw(hidden, mean=1.0)
        weights[f"{prefix}post_attention_layernorm.weight"] = draw(hidden, mean=1.0)
    weights["model.norm.weight"] = draw(hidden, mean=1.0)
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = draw(config["vocab_size"], hidden)
    return weights
