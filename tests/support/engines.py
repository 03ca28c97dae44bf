"""Engines on the tiny model, and a driver that checks every invariant after every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_worker.config import EngineConfig
from engine_worker.engine import Engine
from engine_worker.models.base import LoadedModel
from engine_worker.request import Request, TokenEvent

__all__ = ["EngineRun", "OracleRun", "engine_for", "oracle"]


def engine_for(loaded: LoadedModel, **config: Any) -> Engine:
    """A fresh engine over the same weights; few blocks, so that tests are quick."""
    return Engine(loaded, EngineConfig(**({"num_blocks": 256} | config)))


@dataclass
class EngineRun:
    """Steps an engine and sorts its events by request."""

    engine: Engine
    events: dict[str, list[TokenEvent]] = field(default_factory=dict)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)

    def step(self) -> list[TokenEvent]:
        """One step; blocks are conserved, and nothing comes after an end."""
        events = self.engine.step()
        self.engine.check_integrity()
        for event in events:
            known = self.events.setdefault(event.request_id, [])
            assert not known or known[-1].finish_reason is None, f"{event.request_id} goes on after its end"
            known.append(event)
        return events

    def finish(self, max_steps: int = 5000) -> EngineRun:
        """Steps until nothing is left; then no block may be held."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                assert self.engine.stats().blocks_used == 0
                return self
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def staggered(self, requests: Iterable[Request], every: int) -> EngineRun:
        """A new request every `every` steps, then until the end."""
        for request in requests:
            self.add(request)
            for _ in range(every):
                self.step()
        return self.finish()

    def tokens(self, request: Request) -> list[int]:
        return [event.token_id for event in self.events[request.request_id] if event.token_id is not None]

    def end(self, request: Request) -> TokenEvent:
        """The event that finished the request."""
        last = self.events[request.request_id][-1]
        assert last.finish_reason is not None
        return last


@dataclass(frozen=True)
class OracleRun:
    """What transformers' generate puts out, by how much each token won over the second best, how probable it was."""

    tokens: list[int]
    margins: list[float]
    logprobs: list[float]


def oracle(model: Any, prompt: Sequence[int], count: int) -> OracleRun:
    """`count` greedy tokens of a transformers model run alone; EOS does not end it."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(out.logits)[:, 0]
    best = logits.topk(2).values
    return OracleRun(
        out.sequences[0, len(prompt) :].tolist(),
        (best[:, 0] - best[:, 1]).tolist(),
        logits.log_softmax(-1).max(-1).values.tolist(),
    )
