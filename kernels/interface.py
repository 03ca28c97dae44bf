"""What a backend must provide: the op table and the per-step view that all layers of a forward pass share.

Models call the coarsest unit, `forward`; its default here is a chain of blocks, theirs one of the fine ops, so a
backend either speeds up single ops or overrides a whole unit with one fused kernel, and no model changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.draws import Draws
from kernels.layout import (
    AttentionWeights,
    BatchLayout,
    KVCache,
    MlpWeights,
    ModelOutput,
    ModelWeights,
    PackedLinear,
    QuantizedTensor,
    RopeTable,
)

__all__ = ["Ops", "Step"]


class Step(Protocol):
    """One forward pass over one batch: what all layers share (gather indices, masks, rotary angles) is prepared
    once."""

    def rope_and_cache(self, qkv: Tensor, layer: int, num_heads: int) -> Tensor:
        """Rotates queries and keys, writes keys and values to the batch's slots of layer `layer`.

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] as `AttentionWeights.qkv` yields it -> queries
        [T, num_heads, head_dim]. qkv is used up: it may hold anything afterwards.
        """

    def attention(self, query: Tensor, layer: int) -> Tensor:
        """Causal attention of queries [T, num_heads, head_dim] over the row's cached positions, straight from the block
        tables, scaled by head_dim ** -0.5 -> [T, num_heads * head_dim].

        Query head h reads KV head h // (num_heads // num_kv_heads). Slots past a row's length never influence the
        result, whatever they hold.
        """


class Ops(ABC):
    """The table. Activations are [T, features] in the weights' dtype; norms and rotations are computed in float32."""

    name: str
    note: str = ""
    """Why this backend was chosen over a faster one, for the log; empty where it is the one asked for."""
    weight_formats: frozenset[str] = frozenset()
    """Quantized formats that `pack_linear` and `pack_embedding` take: as GGUF blocks, or as what to make of plain
    weights."""

    @abstractmethod
    def begin(self, layout: BatchLayout, cache: KVCache, rope: RopeTable) -> Step:
        """Prepares a forward pass over `layout`."""

    @abstractmethod
    def embedding(self, table: PackedLinear, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows token_ids int64 [T] of a table made by `pack_embedding` -> [T, H] of `dtype`."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang, Sennrich 2019)."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Adds x to the residual stream (None: x starts it) -> (norm of the sum in x's dtype, the sum). The stream is
        float32 whatever x is: rounding it after every layer would be most of bfloat16's error. May reuse both inputs'
        memory."""

    @abstractmethod
    def pack_linear(
        self, weight: Tensor | QuantizedTensor, bias: Tensor | None = None, weight_format: str = ""
    ) -> PackedLinear:
        """weight [out, in], bias [out] -> the backend's fastest layout; may keep `weight` itself.

        weight_format: one of `weight_formats`, which plain weights are quantized to; "" keeps what they are. Raises
        ValueError for a format that the backend or the weight's shape does not allow.
        """

    @abstractmethod
    def pack_embedding(self, weight: Tensor | QuantizedTensor, weight_format: str = "") -> PackedLinear:
        """As `pack_linear`, in a layout that `embedding` reads rows from."""

    @abstractmethod
    def tied_head(self, table: PackedLinear) -> PackedLinear:
        """What `logits` takes where it shares the embedding's weights; the table itself where the layout serves
        both."""

    @abstractmethod
    def linear(self, x: Tensor, layer: PackedLinear) -> Tensor:
        """x [T, in] -> [T, out]."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * I], gate first -> silu(gate) * up [T, I]."""

    @abstractmethod
    def logits(self, hidden: Tensor, head: PackedLinear) -> Tensor:
        """hidden [R, H] (already normed) -> float32 [R, V]."""

    @abstractmethod
    def draw(self, logits: Tensor, peak: Tensor, by: Draws, scratch: Tensor) -> list[int]:
        """A token of each row, never one that its filters rule out: see `kernels/draws.py`.

        logits float32 [R, V] (finite or -inf), peak float32 [R] their maxima (finite), scratch float32
        [R, padded(V)], which may hold anything afterwards. A row's token depends on that row alone.
        """

    def attention_block(
        self, x: Tensor, residual: Tensor | None, weights: AttentionWeights, step: Step, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Residual add, norm, attention, output projection -> (what to add to the stream next, the stream)."""
        normed, residual = self.add_rms_norm(x, residual, weights.norm, weights.eps)
        query = step.rope_and_cache(self.linear(normed, weights.qkv), layer, weights.num_heads)
        return self.linear(step.attention(query, layer), weights.output), residual

    def mlp_block(self, x: Tensor, residual: Tensor, weights: MlpWeights) -> tuple[Tensor, Tensor]:
        """Residual add, norm, gated MLP -> (what to add to the stream next, the stream)."""
        normed, residual = self.add_rms_norm(x, residual, weights.norm, weights.eps)
        return self.linear(self.silu_and_mul(self.linear(normed, weights.gate_up)), weights.down), residual

    @torch.no_grad()
    def forward(
        self,
        weights: ModelWeights,
        token_ids: Tensor,
        sample_at: Tensor | None,
        step: Step,
        wanted: Sequence[int] | None = None,
    ) -> ModelOutput:
        """The whole model over the batch of `step`: token_ids int64 [T], at least one layer.

        sample_at: int64 [R], tokens whose largest logit is wanted; None: every token's. wanted: ascending positions in
        it of those whose logits are wanted as well; None: all.
        """
        x, residual = self.embedding(weights.embedding, token_ids, weights.dtype), None
        for index, (attention, mlp) in enumerate(weights.layers):
            x, residual = self.attention_block(x, residual, attention, step, index)
            x, residual = self.mlp_block(x, residual, mlp)
        hidden, _ = self.add_rms_norm(x, residual, weights.norm, weights.eps)
        logits = self.logits(hidden if sample_at is None else hidden.index_select(0, sample_at), weights.head)
        best = logits.argmax(-1)
        peaks = logits.gather(-1, best[:, None])[:, 0]
        return ModelOutput(hidden, logits if wanted is None else logits[list(wanted)], best, peaks)
