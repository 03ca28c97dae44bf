"""Chooses the next token of every row of a batch at once. In: logits and the rows they belong to. Out: one token each.

Everything a row's token depends on is in its row: parameters, seed, tokens so far. Batch mates play no part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine_worker.plan import ScheduledRequest
from engine_worker.request import TokenLogprobs
from engine_worker.sampling.adjust import Adjuster, adjusts, may_rule_out
from engine_worker.sampling.draw import Drawer, is_greedy
from engine_worker.sampling.masks import GrammarMasks
from kernels.ops import Ops

__all__ = ["SampledToken", "Sampler"]

_IMPOSSIBLE = -9999.0
"""Stands for the logarithm of zero, so that every logprob is a finite number."""


class SampledToken(NamedTuple):
    """What one row drew. `token_id` is None when no token is possible: its logits are all masked or not finite.

    A tuple because each running request makes one in every step.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    exhausted: bool = False
    """The request's own fields (bans, bad_words, min_tokens, …) left no token: it has said all that it may."""


class Sampler:
    """Holds scratch memory and token counts only; what it returns could be computed from the rows alone."""

    def __init__(self, ops: Ops) -> None:
        """ops: draws tokens."""
        self._adjuster = Adjuster()
        self._drawer = Drawer(ops)
        self._masks = GrammarMasks()

    def prepare(self, rows: Sequence[ScheduledRequest], vocab_size: int) -> list[int]:
        """Word of the rows to come, before the model runs: grammar masks are made meanwhile. -> which of them `sample`
        needs the logits of, ascending."""
        wanted = [i for i, row in enumerate(rows) if not _takes_best(row, vocab_size)]
        self._masks.prepare([rows[i] for i in wanted], vocab_size)
        return wanted

    def sample(
        self,
        logits: Tensor,
        best: Tensor,
        peaks: Tensor,
        rows: Sequence[ScheduledRequest],
        wanted: Sequence[int],
    ) -> list[SampledToken]:
        """best int64 [R], peaks float32 [R]: the place of each row's first largest logit (NaN counts as such), and that
        logit; row i belongs to rows[i]. logits float32 [W, V], overwritten: of the rows at `wanted`, as `prepare` gave
        it. All other rows take their best."""
        tops = list(zip(best.tolist(), peaks.tolist(), strict=True))
        tokens = [SampledToken(token if math.isfinite(top) else None) for token, top in tops]
        if wanted:
            chosen = self._choose(logits, [tops[i] for i in wanted], [rows[i] for i in wanted])
            for i, token in zip(wanted, chosen, strict=True):
                tokens[i] = token
        return tokens

    def _choose(
        self, logits: Tensor, tops: Sequence[tuple[int, float]], rows: Sequence[ScheduledRequest]
    ) -> list[SampledToken]:
        """logits [R, V], overwritten, and each row's first largest."""
        with_logprobs = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        # Reported probabilities are the model's own: copied before anything is adjusted.
        untouched = _rows(logits, with_logprobs) if with_logprobs else None
        self._masks.keep(logits, rows)
        touched = self._adjuster.adjust(logits, rows) | self._masks.apply(logits, rows)
        ids, peaks = _renewed(logits, tops, sorted(touched))
        tokens = [token if math.isfinite(top) else None for token, top in zip(ids, peaks, strict=True)]
        self._draw(logits, peaks, rows, tokens)
        logprobs = [None] * len(rows) if untouched is None else _logprobs(untouched, with_logprobs, rows, tokens)
        return [
            SampledToken(token, lp, exhausted=top == -math.inf and row.matcher is None and may_rule_out(row.sampling))
            for token, lp, top, row in zip(tokens, logprobs, peaks, rows, strict=True)
        ]

    def _draw(
        self, logits: Tensor, peaks: Sequence[float], rows: Sequence[ScheduledRequest], tokens: list[int | None]
    ) -> None:
        """Replaces the best token of rows that sample by a drawn one."""
        vocab_size = logits.shape[1]
        drawing = [i for i, t in enumerate(tokens) if t is not None and not is_greedy(rows[i].sampling, vocab_size)]
        if not drawing:
            return
        if len(drawing) < len(rows):
            logits = _rows(logits, drawing)
        peak = np.array([peaks[i] for i in drawing], dtype=np.float32)
        chosen = [rows[i] for i in drawing]
        drawn = self._drawer.draw(
            logits,
            torch.from_numpy(peak).to(logits.device),
            [row.sampling for row in chosen],
            [row.seed for row in chosen],
            [len(row.output_token_ids) for row in chosen],
        )
        for i, token in zip(drawing, drawn, strict=True):
            tokens[i] = token


def _rows(x: Tensor, indices: Sequence[int]) -> Tensor:
    """x [R, …] -> [len(indices), …]."""
    return torch.from_numpy(x.numpy()[indices]) if x.device.type == "cpu" else x[indices]


def _takes_best(row: ScheduledRequest, vocab_size: int) -> bool:
    """Whether nothing is wanted of the row's logits but their largest."""
    params = row.sampling
    return is_greedy(params, vocab_size) and row.matcher is None and params.logprobs is None and not adjusts(params)


def _renewed(
    logits: Tensor, tops: Sequence[tuple[int, float]], touched: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Each row's first largest (NaN counts as such) -> ids, values. `tops` knows them but of rows that were touched
    since."""
    ids, peaks = [token for token, _ in tops], [top for _, top in tops]
    if touched:
        changed = _rows(logits, touched)
        best = torch.from_numpy(changed.numpy().argmax(-1)) if changed.device.type == "cpu" else changed.argmax(-1)
        values = changed.gather(-1, best[:, None])[:, 0]
        for i, token, top in zip(touched, best.tolist(), values.tolist(), strict=True):
            ids[i], peaks[i] = token, top
    return ids, peaks


def _logprobs(
    logits: Tensor, indices: Sequence[int], rows: Sequence[ScheduledRequest], tokens: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Natural-log probabilities of the rows at `indices`, whose logits [len(indices), V] are; None for all others."""
    result: list[TokenLogprobs | None] = [None] * len(rows)
    wanted = [rows[i].sampling.logprobs or 0 for i in indices]
    logprobs = logits.log_softmax(-1).clamp_(min=_IMPOSSIBLE)
    chosen_ids = torch.tensor([tokens[i] or 0 for i in indices], device=logits.device)
    chosen = logprobs.gather(-1, chosen_ids[:, None])[:, 0].tolist()
    top = logprobs.topk(min(max(wanted), logits.shape[1]))
    for i, count, own, values, ids in zip(
        indices, wanted, chosen, top.values.tolist(), top.indices.tolist(), strict=True
    ):
        if tokens[i] is not None:
            result[i] = TokenLogprobs(own, tuple(zip(ids[:count], values[:count], strict=True)))
    return result
