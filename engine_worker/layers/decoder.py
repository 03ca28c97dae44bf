"""One pre-norm decoder layer (attention with rotary positions and shared KV heads, gated MLP): its weights and its
forward.

Everything is computed by the op table; this module only knows which checkpoint tensors make up which fused weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_worker.layers.specs import LinearSpec, TensorSpec
from engine_worker.layers.weights import WeightStore
from kernels.ops import AttentionWeights, MlpWeights

__all__ = ["DecoderShape"]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What all decoder layers of a model share."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    def specs(self, prefix: str) -> list[TensorSpec | LinearSpec]:
        """Parameters of the layer whose checkpoint names start with `prefix` ("model.layers.0.")."""
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = (
            (f"{prefix}self_attn.q_proj", q_rows),
            (f"{prefix}self_attn.k_proj", kv_rows),
            (f"{prefix}self_attn.v_proj", kv_rows),
        )
        gate_up = (
            (f"{prefix}mlp.gate_proj", self.intermediate_size),
            (f"{prefix}mlp.up_proj", self.intermediate_size),
        )
        output = ((f"{prefix}self_attn.o_proj", self.hidden_size),)
        down = ((f"{prefix}mlp.down_proj", self.hidden_size),)
        return [
            TensorSpec(f"{prefix}input_layernorm.weight", (self.hidden_size,)),
            LinearSpec(f"{prefix}qkv", qkv, self.hidden_size, self.qkv_bias),
            LinearSpec(f"{prefix}output", output, q_rows, self.output_bias),
            TensorSpec(f"{prefix}post_attention_layernorm.weight", (self.hidden_size,)),
            LinearSpec(f"{prefix}gate_up", gate_up, self.hidden_size, self.mlp_bias),
            LinearSpec(f"{prefix}down", down, self.intermediate_size, self.mlp_bias),
        ]

    def weights(self, store: WeightStore, prefix: str) -> tuple[AttentionWeights, MlpWeights]:
        """The finished parameters of that layer. Raises LoadError where the checkpoint lacked some."""
        attention = AttentionWeights(
            norm=store.tensor(f"{prefix}input_layernorm.weight"),
            qkv=store.linear(f"{prefix}qkv"),
            output=store.linear(f"{prefix}output"),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.eps,
        )
        mlp = MlpWeights(
            norm=store.tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=store.linear(f"{prefix}gate_up"),
            down=store.linear(f"{prefix}down"),
            eps=self.eps,
        )
        return attention, mlp
