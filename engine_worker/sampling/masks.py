"""Structured output in the sampler: rules out tokens that cannot lead to a match of a row's grammar.

`prepare` starts filling the masks on a thread of its own, so that it happens while the model runs; `apply` waits for
what is left of it. A row's mask depends on its grammar and its output alone: computing a batch again,
in parts, or after a take-over gives the same one. Where a row's other fields leave nothing of what its grammar allows,
the grammar wins: the output stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.plan import ScheduledRequest
from engine_worker.sampling.adjust import may_rule_out
from shared.grammars.backend import TokenMatcher, fill_masks

__all__ = ["GrammarMasks"]


class GrammarMasks:
    """Holds the masks of one batch, between `prepare` and `apply`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._pending: Future[NDArray[np.bool_]] | None = None
        self._ids: list[str] = []
        self._own: dict[int, Tensor] = {}
        """The model's own logits, by row, of rows whose fields could forbid all that their grammar allows."""

    def prepare(self, rows: Sequence[ScheduledRequest], vocab_size: int) -> None:
        """Begins with the masks of the rows that have a grammar. `rows` are those that `apply` will get."""
        work = [(row.matcher, row.output_token_ids) for row in rows if row.matcher is not None]
        self._ids = [row.request_id for row in rows if row.matcher is not None]
        self._pending = self._pool.submit(_fill, work, vocab_size) if work else None

    def keep(self, logits: Tensor, rows: Sequence[ScheduledRequest]) -> None:
        """Copies what `apply` may need of the logits before anything adjusts them."""
        wanted = [i for i, row in enumerate(rows) if row.matcher is not None and may_rule_out(row.sampling)]
        self._own = {i: logits[i].clone() for i in wanted}

    def apply(self, logits: Tensor, rows: Sequence[ScheduledRequest]) -> set[int]:
        """logits float32 [R, V], changed in place, last of all: what a grammar forbids becomes -inf -> which rows."""
        places = [i for i, row in enumerate(rows) if row.matcher is not None]
        if not places:
            return set()
        if self._pending is None or self._ids != [rows[i].request_id for i in places]:
            self.prepare(rows, logits.shape[1])
        assert self._pending is not None
        pending, self._pending = self._pending, None
        allowed = pending.result()
        forbidden = torch.from_numpy(~allowed).to(logits.device)
        if len(places) == len(rows):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            index = torch.tensor(places, device=logits.device)
            logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)
        for line, place in enumerate(places):
            if place in self._own and bool(torch.isneginf(logits[place]).all()):
                logits[place] = self._own[place].masked_fill_(forbidden[line], -torch.inf)
        return set(places)


def _fill(work: Sequence[tuple[TokenMatcher, Sequence[int]]], vocab_size: int) -> NDArray[np.bool_]:
    for matcher, output in work:
        matcher.follow(output)
    return fill_masks([matcher for matcher, _ in work], vocab_size)
