"""The Llama family: Llama, Mistral and Qwen2 differ only in configuration (biases, heads, rope, tied embeddings)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_worker.layers.decoder import DecoderShape
from engine_worker.layers.rope import rope_table
from engine_worker.layers.specs import LinearSpec, TensorSpec
from engine_worker.layers.weights import WeightStore
from engine_worker.models.config import ModelConfig
from kernels.ops import BatchLayout, KVCache, ModelOutput, ModelWeights, Ops, new_kv_cache

__all__ = ["Llama"]

_EMBEDDING = "model.embed_tokens"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head"


def _shape(config: ModelConfig) -> DecoderShape:
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        qkv_bias=config.qkv_bias,
        output_bias=config.attention_output_bias,
        mlp_bias=config.mlp_bias,
    )


class Llama:
    """A `Model` (see engine_worker/models/base.py)."""

    def __init__(self, config: ModelConfig, store: WeightStore, ops: Ops, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._ops = ops
        shape = _shape(config)
        embedding = store.linear(_EMBEDDING)
        self._weights = ModelWeights(
            embedding=embedding,
            layers=[shape.weights(store, f"model.layers.{index}.") for index in range(config.num_layers)],
            norm=store.tensor(_FINAL_NORM),
            eps=config.rms_norm_eps,
            head=ops.tied_head(embedding) if config.tie_word_embeddings else store.linear(_HEAD),
            dtype=config.torch_dtype,
        )
        self._rope = rope_table(config.rope, config.max_model_len, device)

    @staticmethod
    def specs(config: ModelConfig) -> list[TensorSpec | LinearSpec]:
        """The checkpoint tensors this model takes."""
        shape = _shape(config)
        words, hidden = config.vocab_size, config.hidden_size
        specs: list[TensorSpec | LinearSpec] = [
            LinearSpec(_EMBEDDING, ((_EMBEDDING, words),), hidden, lookup=True, precise=True)
        ]
        for index in range(config.num_layers):
            specs += shape.specs(f"model.layers.{index}.")
        specs.append(TensorSpec(_FINAL_NORM, (hidden,)))
        if not config.tie_word_embeddings:
            specs.append(LinearSpec(_HEAD, ((_HEAD, words),), hidden, precise=True))
        return specs

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def device(self) -> torch.device:
        return self._device

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty cache of this model's shape, dtype and device."""
        config = self._config
        return new_kv_cache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            config.torch_dtype,
            self._device,
            config.cache_torch_dtype,
        )

    def forward(
        self,
        token_ids: Tensor,
        layout: BatchLayout,
        kv_cache: KVCache,
        sample_at: Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> ModelOutput:
        """See `Model.forward`."""
        step = self._ops.begin(layout, kv_cache, self._rope)
        return self._ops.forward(self._weights, token_ids, sample_at, step, wanted)

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model.compute_logits`."""
        return self._ops.logits(hidden, self._weights.head)
