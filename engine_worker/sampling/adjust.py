"""Changes logits before a token is drawn: penalties, logit_bias, min_tokens, bad_words, allowed_token_ids.

Only rows that ask for something cost anything. What was counted of a request's tokens is kept from step to step and can
be rebuilt from prompt and output at any time: a continuation on another worker adjusts alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.plan import ScheduledRequest
from shared.params import BAN, SamplingParams

__all__ = ["Adjuster", "adjusts", "may_rule_out"]

_NO_IDS = np.empty(0, dtype=np.int64)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def may_rule_out(params: SamplingParams) -> bool:
    """Whether these fields can forbid tokens, and so, taken together, all of them."""
    banned = any(bias <= BAN for bias in params.logit_bias.values())
    return bool(banned or params.bad_words or params.min_tokens or params.allowed_token_ids is not None)


def adjusts(params: SamplingParams) -> bool:
    """Whether these fields change any logit."""
    return _has_penalties(params) or bool(params.logit_bias) or may_rule_out(params)


class _Counts:
    """How often each token occurs in one request's output; prompt tokens are listed with count 0."""

    def __init__(self, row: ScheduledRequest) -> None:
        self.output = row.output_token_ids
        self._place: dict[int, int] = {}
        self._ids: list[int] = []
        self._counts: list[int] = []
        self._num_seen = 0
        # Only the repetition penalty looks at the prompt; the split prompt/output never moves.
        if row.sampling.repetition_penalty != 1.0:
            self._count(dict.fromkeys(row.prompt_token_ids), 0)

    def update(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Takes in new output tokens -> (distinct ids, how often each was put out)."""
        self._count(islice(self.output, self._num_seen, None), 1)
        self._num_seen = len(self.output)
        return np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.float32)

    def _count(self, tokens: Iterable[int], step: int) -> None:
        for token in tokens:
            place = self._place.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += step


class Adjuster:
    """Adjusts the logits of a batch in place. Holds counts of the requests of the last batch only."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def adjust(self, logits: Tensor, rows: Sequence[ScheduledRequest]) -> set[int]:
        """logits float32 [R, V], contiguous; row i belongs to rows[i] -> which were changed. Order: penalties, bias,
        bans."""
        penalised = [(i, row) for i, row in enumerate(rows) if _has_penalties(row.sampling)]
        self._penalise(logits, penalised)
        biased = [(i, row.sampling.logit_bias) for i, row in enumerate(rows) if row.sampling.logit_bias]
        if biased:
            values = np.concatenate([np.fromiter(bias.values(), np.float32, len(bias)) for _, bias in biased])
            values[values <= BAN] = -np.inf
            flat = _flat(logits, [(i, np.fromiter(bias, np.int64, len(bias))) for i, bias in biased])
            logits.view(-1)[flat] += torch.from_numpy(values).to(logits.device)
        strict = [(i, row) for i, row in enumerate(rows) if row.sampling.min_tokens or row.sampling.bad_words]
        banned = [(i, ids) for i, row in strict if len(ids := _banned(row))]
        if banned:
            logits.view(-1)[_flat(logits, banned)] = -torch.inf
        limited = [(i, kept) for i, row in enumerate(rows) if (kept := row.sampling.allowed_token_ids) is not None]
        for i, kept in limited:
            _keep_only(logits[i], kept)
        return {i for changed in (penalised, biased, banned, limited) for i, _ in changed}

    def _penalise(self, logits: Tensor, rows: Sequence[tuple[int, ScheduledRequest]]) -> None:
        self._counts = {row.request_id: self._counts_of(row) for _, row in rows}
        if not rows:
            return
        seen = [self._counts[row.request_id].update() for _, row in rows]
        lengths = [len(ids) for ids, _ in seen]
        flat = _flat(logits, [(i, ids) for (i, _), (ids, _) in zip(rows, seen, strict=True)])
        counts = torch.from_numpy(np.concatenate([count for _, count in seen])).to(logits.device)

        def spread(values: Iterable[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(list(values), np.float32), lengths)).to(logits.device)

        repetition = spread(row.sampling.repetition_penalty for _, row in rows)
        values = logits.view(-1)[flat]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= spread(row.sampling.frequency_penalty for _, row in rows) * counts
        values -= spread(row.sampling.presence_penalty for _, row in rows) * (counts > 0)
        logits.view(-1)[flat] = values

    def _counts_of(self, row: ScheduledRequest) -> _Counts:
        known = self._counts.get(row.request_id)
        # The same list object only ever grows; any other one belongs to a later request of the same id.
        return known if known is not None and known.output is row.output_token_ids else _Counts(row)


def _banned(row: ScheduledRequest) -> NDArray[np.int64]:
    """Stop tokens before the minimum length, and the last tokens of bad words whose beginning is the output's end."""
    output, params = row.output_token_ids, row.sampling
    ids: list[int] = list(row.stop_token_ids) if len(output) < params.min_tokens else []
    for *beginning, last in params.bad_words:
        if not beginning or output[-len(beginning) :] == beginning:
            ids.append(last)
    return np.array(ids, dtype=np.int64)


def _keep_only(logits: Tensor, ids: Sequence[int]) -> None:
    """Rules out all but these tokens in one row, float32 [V]."""
    kept = torch.tensor(ids, device=logits.device)
    values = logits[kept]
    logits.fill_(-torch.inf)
    logits[kept] = values


def _flat(logits: Tensor, ids_by_row: Sequence[tuple[int, NDArray[np.int64]]]) -> Tensor:
    """Positions in the flattened logits, int64 [sum of lengths], on their device."""
    parts = [ids + row * logits.shape[1] for row, ids in ids_by_row]
    return torch.from_numpy(np.concatenate(parts) if parts else _NO_IDS).to(logits.device)
