"""The op table on our own C++ kernels (src/): packed weights, one call for a whole forward pass.

Float32 and bfloat16 models; any other type runs on the reference backend. dense.py has the operators without attention.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from kernels.cpu.dense import VECTOR, DenseOps, expect
from kernels.cpu.library import DTYPES, STORAGE, HrAttention, HrMlp, HrModel, HrStep, HrTokens, Library
from kernels.cpu.packing import attention_struct, linear_struct, mlp_struct, pointer_array
from kernels.cpu.scratch import Pages
from kernels.interface import Step
from kernels.layout import (
    AttentionWeights,
    BatchLayout,
    KVCache,
    LayerCache,
    MlpWeights,
    ModelOutput,
    ModelWeights,
    RopeTable,
)

__all__ = ["NativeOps"]


class _NativeStep:
    """One batch, as pointers; keeps what they point to alive."""

    def __init__(self, ops: NativeOps, layout: BatchLayout, cache: KVCache, rope: RopeTable, serial: int) -> None:
        self._ops = ops
        self.dtype = cache.dtype
        self.num_tokens = layout.num_tokens
        self._head_dim = cache.head_dim
        self._kv_heads = cache.num_kv_heads
        pages = ops.cache_pointers(cache)
        self._alive = (layout, cache, rope, pages)
        self.struct = HrStep(
            _pointer(layout.query_start, torch.int32),
            _pointer(layout.seq_lens, torch.int32),
            _pointer(layout.block_tables, torch.int32),
            _pointer(layout.slot_mapping, torch.int64),
            _pointer(layout.positions, torch.int64),
            _pointer(rope.cos, torch.float32),
            _pointer(rope.sin, torch.float32),
            *(ctypes.addressof(addresses) for addresses in pages),
            layout.num_tokens,
            layout.seq_lens.shape[0],
            layout.block_tables.shape[1],
            cache.block_size,
            cache.num_kv_heads,
            cache.head_dim,
            rope.cos.shape[1],
            DTYPES[self.dtype],
            STORAGE[cache.storage],
            serial,
        )

    def rope_and_cache(self, qkv: Tensor, layer: int, num_heads: int) -> Tensor:
        """See `Step`."""
        expect(qkv, self.dtype, (self.num_tokens, (num_heads + 2 * self._kv_heads) * self._head_dim))
        query = torch.empty((self.num_tokens, num_heads, self._head_dim), dtype=self.dtype)
        self._ops.functions.hr_rotate_and_cache(
            self._ops.workspace, self.struct, layer, num_heads, qkv.data_ptr(), query.data_ptr()
        )
        return query

    def attention(self, query: Tensor, layer: int) -> Tensor:
        """See `Step`."""
        num_heads = query.shape[1]
        expect(query, self.dtype, (self.num_tokens, num_heads, self._head_dim))
        out = torch.empty((self.num_tokens, num_heads * self._head_dim), dtype=self.dtype)
        self._ops.functions.hr_attention(
            self._ops.workspace, self.struct, layer, num_heads, query.data_ptr(), out.data_ptr()
        )
        return out


class NativeOps(DenseOps):
    """CPU backend in C++."""

    def __init__(self, library: Library, threads: int = 0, *, batch_invariant: bool = False) -> None:
        super().__init__(library, threads, batch_invariant=batch_invariant)
        self._serial = count()
        # The C views of weights, by identity; the tuple keeps the weights alive, so an identity is never reused.
        self._attention: dict[int, tuple[HrAttention, AttentionWeights, Tensor]] = {}
        self._mlp: dict[int, tuple[HrMlp, MlpWeights, Tensor]] = {}
        self._models: dict[int, tuple[HrModel | None, ModelWeights]] = {}

    def cache_pointers(self, cache: KVCache) -> tuple[Pages, Pages, Pages, Pages]:
        """Addresses of every layer's keys, values, and of their scales (as many as there are). Made once per cache and
        thread."""
        scratch = self._scratch
        if scratch.cache is not cache or scratch.pages is None:
            if not all(page.is_contiguous() for layer in (*cache.layers, *cache.scales) for page in layer):
                raise ValueError("the KV cache's pages must be contiguous")
            scratch.pages = (*_addresses(cache.layers), *_addresses(cache.scales))
            scratch.cache = cache
        return scratch.pages

    def begin(self, layout: BatchLayout, cache: KVCache, rope: RopeTable) -> Step:
        if cache.dtype not in DTYPES or cache.storage not in STORAGE:
            return super().begin(layout, cache, rope)
        return _NativeStep(self, layout, cache, rope, next(self._serial))

    def attention_block(
        self, x: Tensor, residual: Tensor | None, weights: AttentionWeights, step: Step, layer: int
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(step, _NativeStep) or not weights.qkv.packed:
            return super().attention_block(x, residual, weights, step, layer)
        shape = (step.num_tokens, weights.qkv.in_features)
        expect(x, step.dtype, shape)
        stream = x.float() if residual is None else residual
        expect(stream, torch.float32, shape)
        # x is used up once it is added to the stream, so the result takes its place.
        out = torch.empty_like(x) if residual is None else x
        self.functions.hr_attention_block(
            self.workspace,
            step.struct,
            self._attention_struct(weights),
            layer,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        return out, stream

    def mlp_block(self, x: Tensor, residual: Tensor, weights: MlpWeights) -> tuple[Tensor, Tensor]:
        if not weights.gate_up.packed:
            return super().mlp_block(x, residual, weights)
        shape = (x.shape[0], weights.gate_up.in_features)
        expect(x, x.dtype, shape)
        expect(residual, torch.float32, shape)
        self.functions.hr_mlp_block(
            self.workspace,
            self._mlp_struct(weights),
            DTYPES[x.dtype],
            shape[0],
            x.data_ptr(),
            residual.data_ptr(),
            x.data_ptr(),
        )
        return x, residual

    def forward(
        self,
        weights: ModelWeights,
        token_ids: Tensor,
        sample_at: Tensor | None,
        step: Step,
        wanted: Sequence[int] | None = None,
    ) -> ModelOutput:
        prepared = self._prepared(weights)
        if prepared is None or not isinstance(step, _NativeStep):
            return super().forward(weights, token_ids, sample_at, step, wanted)
        if token_ids.numel() != step.num_tokens or weights.dtype is not step.dtype:
            raise ValueError(f"expected {step.num_tokens} token ids and weights for {step.dtype}")
        sampled = step.num_tokens if sample_at is None else sample_at.numel()
        num_wanted = sampled if wanted is None else len(wanted)
        output = self._scratch.output(weights, step.num_tokens, sampled, num_wanted)
        lines = None if wanted is None or not num_wanted else _lines(wanted, sampled)
        tokens = HrTokens(
            _pointer(token_ids, torch.int64),
            None if sample_at is None else _pointer(sample_at, torch.int64),
            sampled,
            output.hidden.data_ptr(),
            output.logits.data_ptr() if num_wanted else None,
            None if lines is None else ctypes.addressof(lines),
            output.peaks.data_ptr(),
            output.best.data_ptr(),
        )
        if self.functions.hr_forward(self.workspace, step.struct, prepared, tokens) != 0:
            raise ValueError(
                f"token ids must lie between 0 and {weights.embedding.out_features - 1}, and be in the batch"
            )
        return output

    def _prepared(self, weights: ModelWeights) -> HrModel | None:
        """The C view of a model, None where some of it is not ours."""
        if id(weights) not in self._models:
            self._models[id(weights)] = (self._prepare(weights), weights)
        return self._models[id(weights)][0]

    def _prepare(self, weights: ModelWeights) -> HrModel | None:
        linears = [linear for a, m in weights.layers for linear in (a.qkv, a.output, m.gate_up, m.down)]
        groups = {attention.num_heads // attention.num_kv_heads for attention, _ in weights.layers}
        packed = all(linear.packed for linear in (*linears, weights.embedding, weights.head))
        if not packed or len(groups) != 1 or weights.norm.numel() % VECTOR:
            return None
        return HrModel(
            linear_struct(weights.embedding),
            linear_struct(weights.head),
            pointer_array([self._attention_struct(attention) for attention, _ in weights.layers]),
            pointer_array([self._mlp_struct(mlp) for _, mlp in weights.layers]),
            self._wide_norm(weights.norm).data_ptr(),
            len(weights.layers),
            weights.eps,
        )

    def _attention_struct(self, weights: AttentionWeights) -> HrAttention:
        known = self._attention.get(id(weights))
        if known is None:
            norm = weights.norm.float().contiguous()
            known = self._attention[id(weights)] = (attention_struct(weights, norm), weights, norm)
        return known[0]

    def _mlp_struct(self, weights: MlpWeights) -> HrMlp:
        known = self._mlp.get(id(weights))
        if known is None:
            norm = weights.norm.float().contiguous()
            known = self._mlp[id(weights)] = (mlp_struct(weights, norm), weights, norm)
        return known[0]


def _addresses(layers: Sequence[LayerCache]) -> tuple[Pages, Pages]:
    kind = ctypes.c_void_p * len(layers)
    return kind(*(layer.key.data_ptr() for layer in layers)), kind(*(layer.value.data_ptr() for layer in layers))


def _lines(wanted: Sequence[int], count: int) -> ctypes.Array[ctypes.c_int64]:
    """The line of the result that each of `count` rows gets, -1 for those that get none."""
    lines = (ctypes.c_int64 * count)(*[-1] * count)
    for line, row in enumerate(wanted):
        lines[row] = line
    return lines


def _pointer(x: Tensor, dtype: torch.dtype) -> int:
    if x.dtype is not dtype or not x.is_contiguous():
        raise ValueError(f"expected a contiguous {dtype} tensor, got {x.dtype} {tuple(x.shape)}")
    return x.data_ptr()
