"""The element-wise and linear operators on our own C++ kernels, and the embedding read from packed rows.

Float32 and bfloat16; any other type runs on the reference backend it inherits. Scratch memory belongs to the calling
thread, so engines on threads of their own may share a model.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, Library
from kernels.cpu.packing import QUANTIZED, Arena, linear_struct, pack
from kernels.cpu.scratch import Scratch
from kernels.draws import Draws, padded
from kernels.layout import PackedLinear, QuantizedTensor
from kernels.reference import ReferenceOps

__all__ = ["VECTOR", "DenseOps", "expect"]

VECTOR = 16
"""The element-wise kernels handle rows of a multiple of this."""


class DenseOps(ReferenceOps):
    """CPU backend in C++ but for attention."""

    weight_formats = QUANTIZED

    def __init__(self, library: Library, threads: int = 0, *, batch_invariant: bool = False) -> None:
        """threads: how many a call may use, the caller's included; 0 = as many as torch. batch_invariant: a token's
        results have the same bits alone, in any batch, and in any chunk of a prompt."""
        self.name = f"native-{library.level}"
        self.functions = library.functions
        self._library = library
        self.threads = threads or torch.get_num_threads()
        self._scratch = Scratch(self.functions, self.threads, batch_invariant)
        self._arena = Arena(library)
        # By identity; the tuple keeps the weight alive, so an identity is never reused.
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def workspace(self) -> int:
        """The calling thread's."""
        workspace: int = self._scratch.workspace
        return workspace

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _elementwise(x):
            return super().rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not _elementwise(x):
            return super().add_rms_norm(x, residual, weight, eps)
        if residual is not None:
            expect(residual, torch.float32, x.shape)
        return self._norm(x, residual, weight, eps), x.float() if residual is None else residual

    def _norm(self, x: Tensor, stream: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        self.functions.hr_rms_norm(
            self.workspace,
            DTYPES[x.dtype],
            x.numel() // width,
            width,
            x.data_ptr(),
            None if stream is None else stream.data_ptr(),
            self._wide_norm(weight).data_ptr(),
            eps,
            out.data_ptr(),
        )
        return out

    def _wide_norm(self, weight: Tensor) -> Tensor:
        if weight.dtype is torch.float32:
            return weight
        known = self._norms.get(id(weight))
        if known is None:
            known = self._norms[id(weight)] = (weight.float(), weight)
        return known[0]

    def draw(self, logits: Tensor, peak: Tensor, by: Draws, scratch: Tensor) -> list[int]:
        rows, words = logits.shape
        expect(logits, torch.float32, (rows, words))
        expect(peak, torch.float32, (rows,))
        expect(scratch, torch.float32, (rows, padded(words)))
        if any(len(column) != rows or not column.flags.c_contiguous for column in by):
            raise ValueError(f"expected one contiguous entry for each of {rows} rows to draw by")
        tokens = (ctypes.c_int64 * rows)()
        self.functions.hr_draw(
            logits.data_ptr(),
            rows,
            words,
            peak.data_ptr(),
            *(column.ctypes.data for column in by),
            scratch.data_ptr(),
            tokens,
            self.threads,
        )
        return list(tokens)

    def pack_linear(
        self, weight: Tensor | QuantizedTensor, bias: Tensor | None = None, weight_format: str = ""
    ) -> PackedLinear:
        if isinstance(weight, Tensor) and weight.dtype not in DTYPES:
            return super().pack_linear(weight, bias, weight_format)
        return pack(self._library, self._arena, weight, bias, weight_format, self.threads)

    def pack_embedding(self, weight: Tensor | QuantizedTensor, weight_format: str = "") -> PackedLinear:
        return self.pack_linear(weight, None, weight_format)

    def embedding(self, table: PackedLinear, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        if not table.packed or dtype not in DTYPES:
            return super().embedding(table, token_ids, dtype)
        expect(token_ids, torch.int64, (token_ids.numel(),))
        if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < table.out_features:
            raise ValueError(f"token ids must lie between 0 and {table.out_features - 1}")
        out = torch.empty((token_ids.numel(), table.in_features), dtype=dtype)
        self.functions.hr_rows(
            self.workspace,
            linear_struct(table),
            DTYPES[dtype],
            token_ids.numel(),
            token_ids.data_ptr(),
            out.data_ptr(),
        )
        return out

    def linear(self, x: Tensor, layer: PackedLinear) -> Tensor:
        return self._linear(x, layer, x.dtype) if layer.packed else super().linear(x, layer)

    def logits(self, hidden: Tensor, head: PackedLinear) -> Tensor:
        return self._linear(hidden, head, torch.float32) if head.packed else super().logits(hidden, head)

    def _linear(self, x: Tensor, layer: PackedLinear, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        rows = x.numel() // layer.in_features
        expect(x, x.dtype, (rows, layer.in_features))
        out = torch.empty((rows, layer.out_features), dtype=dtype)
        self.functions.hr_linear(
            self.workspace, linear_struct(layer), DTYPES[x.dtype], rows, x.data_ptr(), out.data_ptr(), DTYPES[dtype]
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        if not _elementwise(gate_up) or width % VECTOR:
            return super().silu_and_mul(gate_up)
        out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype)
        rows = out.numel() // width
        self.functions.hr_silu_mul(
            self.workspace, DTYPES[gate_up.dtype], rows, width, gate_up.data_ptr(), out.data_ptr()
        )
        return out


def _elementwise(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.is_contiguous() and x.shape[-1] % VECTOR == 0


def expect(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The C++ side checks nothing, so a wrong tensor must stop here."""
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(
            f"expected a contiguous {dtype} tensor of shape {tuple(shape)}, got {x.dtype} {tuple(x.shape)}"
        )
