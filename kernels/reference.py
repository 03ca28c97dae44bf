"""Plain torch: the oracle of every other backend, and good enough to serve with. Right on CPU and CUDA.

Attention gathers each row's valid slots through the block table (a slot past the row's length is never read, so stale
values, NaN included, cannot leak) and calls torch's fused SDPA: once per group of decode rows of similar length, once
per prefill row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import draw_host, draw_torch
from kernels.draws import Draws
from kernels.interface import Ops, Step
from kernels.layout import BatchLayout, KVCache, LayerCache, PackedLinear, QuantizedTensor, RopeTable

__all__ = ["ReferenceOps"]

_GROUP_RATIO = 2
"""Decode rows share one padded call while the longest has at most this many times the shortest's slots …"""
_GROUP_SLACK = 128
"""… or the padding stays below this many slots a row: a call of its own costs more than that."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Rows of one new token each, padded to the longest of them."""

    tokens: Tensor
    """int64 [N], token index of each row."""
    slots: Tensor
    """int64 [N * S], cache slots of positions 0 … S - 1; padding repeats the row's last valid slot."""
    mask: Tensor | None
    """[N, 1, 1, S], 0 where valid and -inf where padding; None without padding."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One row of several new tokens."""

    start: int
    end: int
    """Token range in the batch."""
    slots: Tensor
    """int64 [L], cache slots of positions 0 … L - 1."""
    mask: Tensor | None
    """[Q, L], 0 where the query may look and -inf elsewhere; None where the row starts at position 0 (plain causal)."""


class _ReferenceStep:
    """Gather indices, masks and angles of one batch, made once for all layers."""

    def __init__(self, layout: BatchLayout, cache: KVCache, rope: RopeTable) -> None:
        self._layers = [_slotwise(layer) for layer in cache.layers]
        self._scales = [_slotwise(scales) for scales in cache.scales]
        self._kv_heads = cache.num_kv_heads
        self._head_dim = cache.head_dim
        self._slot_mapping = layout.slot_mapping
        self._half = rope.cos.shape[-1]
        self._cos, self._sin = angles(rope, layout.positions, cache.head_dim)
        dtype = cache.dtype
        starts, lengths = layout.query_start.tolist(), layout.seq_lens.tolist()
        rows = [(row, starts[row], starts[row + 1], lengths[row]) for row in range(len(lengths))]
        self._prefills = [
            _prefill(layout, cache.block_size, row, start, end, length, dtype)
            for row, start, end, length in rows
            if end - start > 1
        ]
        decodes = [(length, row, start) for row, start, end, length in rows if end - start == 1]
        self._decodes = [_decodes(layout, cache.block_size, group, dtype) for group in _group(decodes)]

    def rope_and_cache(self, qkv: Tensor, layer: int, num_heads: int) -> Tensor:
        """See `Step`."""
        heads = qkv.view(qkv.shape[0], num_heads + 2 * self._kv_heads, self._head_dim)
        rotated = rotate(heads[:, : num_heads + self._kv_heads], self._cos, self._sin, self._half)
        self._write(rotated[:, num_heads:], layer, 0)
        self._write(heads[:, num_heads + self._kv_heads :], layer, 1)
        return rotated[:, :num_heads]

    def _write(self, x: Tensor, layer: int, kind: int) -> None:
        """x [T, kv_heads, head_dim] -> the batch's slots; kind: 0 keys, 1 values."""
        pages = self._layers[layer][kind]
        if self._scales:
            x, scale = quantize_heads(x)
            self._scales[layer][kind].index_copy_(0, self._slot_mapping, scale)
        pages.index_copy_(0, self._slot_mapping, x.to(pages.dtype))

    def _read(self, slots: Tensor, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values in these slots [S] -> [S, kv_heads, head_dim] each, in `dtype`."""
        key, value = (pages.index_select(0, slots) for pages in self._layers[layer])
        if self._scales:
            key_scale, value_scale = (scale.index_select(0, slots).unsqueeze(-1) for scale in self._scales[layer])
            key, value = key * key_scale, value * value_scale
        return key.to(dtype), value.to(dtype)

    def attention(self, query: Tensor, layer: int) -> Tensor:
        """See `Step`."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for prefill in self._prefills:
            self._attend_prefill(query, layer, prefill, out)
        for decodes in self._decodes:
            self._attend_decodes(query, layer, decodes, out)
        return out.view(query.shape[0], -1)

    def _attend_prefill(self, query: Tensor, layer: int, row: _Prefill, out: Tensor) -> None:
        kv_heads, group = self._kv_heads, query.shape[1] // self._kv_heads
        span = row.end - row.start
        # KV heads are the batch of the call and a KV head's query heads its heads: keys are shared by stride, not
        # repeated.
        q = query[row.start : row.end].view(span, kv_heads, group, -1).permute(1, 2, 0, 3)
        k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in self._read(row.slots, layer, q.dtype))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=row.mask, is_causal=row.mask is None)
        out[row.start : row.end].view(span, kv_heads, group, -1).copy_(attended.permute(2, 0, 1, 3))

    def _attend_decodes(self, query: Tensor, layer: int, rows: _Decodes, out: Tensor) -> None:
        count, kv_heads = rows.tokens.shape[0], self._kv_heads
        # The query heads of a KV head stand in the place of query positions: all of them see the same keys.
        q = query.index_select(0, rows.tokens).view(count, kv_heads, -1, self._head_dim)
        k, v = (
            x.view(count, -1, kv_heads, self._head_dim).transpose(1, 2) for x in self._read(rows.slots, layer, q.dtype)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.mask)
        out.index_copy_(0, rows.tokens, attended.reshape(count, -1, self._head_dim))


class ReferenceOps(Ops):
    """The op table in plain torch."""

    name = "reference"

    def begin(self, layout: BatchLayout, cache: KVCache, rope: RopeTable) -> Step:
        return _ReferenceStep(layout, cache, rope)

    def embedding(self, table: PackedLinear, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(token_ids, table.weight).to(dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x.float() if residual is None else residual.add_(x)
        return self.rms_norm(total, weight.float(), eps).to(x.dtype), total

    def pack_linear(
        self, weight: Tensor | QuantizedTensor, bias: Tensor | None = None, weight_format: str = ""
    ) -> PackedLinear:
        if weight_format or isinstance(weight, QuantizedTensor):
            raise ValueError(f"the {self.name} backend has no quantized weights; expand them first")
        return PackedLinear(weight, bias, weight.shape[1], weight.shape[0], packed=False)

    def pack_embedding(self, weight: Tensor | QuantizedTensor, weight_format: str = "") -> PackedLinear:
        return ReferenceOps.pack_linear(self, weight, None, weight_format)

    def tied_head(self, table: PackedLinear) -> PackedLinear:
        return table

    def linear(self, x: Tensor, layer: PackedLinear) -> Tensor:
        return F.linear(x, layer.weight, layer.bias)

    def draw(self, logits: Tensor, peak: Tensor, by: Draws, scratch: Tensor) -> list[int]:
        if logits.device.type == "cpu":
            return draw_host.draw(draw_host.weigh(logits, peak, by, scratch), by, logits.shape[1])
        return draw_torch.draw(draw_torch.weigh(logits, peak, by, scratch), by, logits.shape[1])

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def logits(self, hidden: Tensor, head: PackedLinear) -> Tensor:
        return self.linear(hidden, head).float()


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> int8 of the same shape, float32 scales [...]: the largest magnitude / 127, so that no
    value is off by more than half a scale. A head that is not finite gets a scale that is not."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0).unsqueeze(-1)
    return (wide * inverse).round().nan_to_num(0.0).to(torch.int8), largest / 127.0


def _slotwise(layer: LayerCache) -> LayerCache:
    """Blocks and their slots as one dimension."""
    return LayerCache(layer.key.flatten(0, 1), layer.value.flatten(0, 1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """Rotary embedding (Su et al. 2021) in the half-split layout: feature i is paired with feature i + half.

    x [T, heads, head_dim]; cos, sin float32 [T, 1, head_dim] as `angles` makes them. Computed in float32, returned in
    x's dtype, contiguous.
    """
    wide = x.float()
    swapped = torch.cat((wide[..., half : 2 * half], wide[..., :half], wide[..., 2 * half :]), dim=-1)
    return (wide * cos).addcmul_(swapped, sin).to(x.dtype)


def angles(rope: RopeTable, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin for `rotate` at positions int64 [T], float32 [T, 1, head_dim] each: signs are folded into sin, and
    features past rotary_dim get angle 0."""
    cos, sin = rope.cos[positions], rope.sin[positions]
    rest = (0, head_dim - 2 * cos.shape[-1])
    wide_cos = F.pad(torch.cat((cos, cos), dim=-1), rest, value=1.0)
    wide_sin = F.pad(torch.cat((-sin, sin), dim=-1), rest)
    return wide_cos.unsqueeze(1), wide_sin.unsqueeze(1)


def _group(decodes: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Splits (length, row, token) into groups of similar length, longest first."""
    groups: list[list[tuple[int, int, int]]] = []
    for item in sorted(decodes, reverse=True):
        longest = groups[-1][0][0] if groups else 0
        if groups and (longest <= _GROUP_RATIO * item[0] or longest - item[0] <= _GROUP_SLACK):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _slots(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """block_tables int64 [N, blocks], positions int64 [N, S] -> cache slots int64 [N, S]."""
    blocks = block_tables.gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _decodes(layout: BatchLayout, block_size: int, group: list[tuple[int, int, int]], dtype: torch.dtype) -> _Decodes:
    device = layout.block_tables.device
    longest = group[0][0]
    lengths = torch.tensor([length for length, _, _ in group], device=device).unsqueeze(1)
    rows = torch.tensor([row for _, row, _ in group], device=device)
    tokens = torch.tensor([token for _, _, token in group], device=device)
    positions = torch.arange(longest, device=device).unsqueeze(0)
    slots = _slots(layout.block_tables[rows].long(), positions.minimum(lengths - 1), block_size)
    mask = None
    if group[-1][0] < longest:
        mask = torch.zeros(slots.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(positions >= lengths, float("-inf"))[:, None, None, :]
    return _Decodes(tokens, slots.flatten(), mask)


def _prefill(
    layout: BatchLayout, block_size: int, row: int, start: int, end: int, length: int, dtype: torch.dtype
) -> _Prefill:
    device = layout.block_tables.device
    positions = torch.arange(length, device=device).unsqueeze(0)
    slots = _slots(layout.block_tables[row : row + 1].long(), positions, block_size).squeeze(0)
    mask = None
    if end - start < length:
        mask = torch.zeros(end - start, length, dtype=dtype, device=device)
        mask = mask.masked_fill_(positions > layout.positions[start:end].unsqueeze(1), float("-inf"))
    return _Prefill(start, end, slots, mask)
