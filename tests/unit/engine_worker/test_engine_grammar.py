"""Grammars in the engine: exact under preemption and take-over, alone in failure, stronger than other wishes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine_worker.models.base import LoadedModel
from engine_worker.request import Request
from shared.grammars.compiler import GrammarCompiler
from shared.params import GrammarSpec, SamplingParams
from shared.text.token_bytes import TokenBytes
from tests.support.engines import EngineRun, engine_for

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["é", "🫠", "x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SPEC = GrammarSpec("json_schema", json.dumps(SCHEMA))
SAMPLED = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def grammars(tiny: LoadedModel) -> GrammarCompiler:
    table = TokenBytes.from_tokenizer_json(tiny.tokenizer_json)
    return GrammarCompiler(tiny.tokenizer_json, table, tiny.eos_token_ids, tiny.config.vocab_size)


class Maker:
    def __init__(self, loaded: LoadedModel, grammars: GrammarCompiler) -> None:
        self._table = TokenBytes.from_tokenizer_json(loaded.tokenizer_json)
        self._grammars = grammars
        self.eos = frozenset(loaded.eos_token_ids)

    def request(self, name: str = "r", spec: GrammarSpec | None = SPEC, **fields: Any) -> Request:
        base: dict[str, Any] = {"sampling": SAMPLED, "seed": 7, "max_tokens": 150, "stop_token_ids": self.eos}
        matcher = None if spec is None else self._grammars.matcher(spec, 1000)
        return Request(name, [5, 6, 7, len(name)], matcher=matcher, **(base | fields))

    def bytes_of(self, token: int) -> bytes:
        return self._table.bytes_of(token)

    def text(self, tokens: list[int]) -> str:
        return b"".join(self._table.bytes_of(token) for token in tokens if token not in self.eos).decode()


@pytest.fixture
def maker(tiny: LoadedModel, grammars: GrammarCompiler) -> Maker:
    return Maker(tiny, grammars)


def finished(tiny: LoadedModel, *requests: Request, **config: Any) -> EngineRun:
    run = EngineRun(engine_for(tiny, **config))
    run.add(*requests)
    return run.finish()


@pytest.mark.parametrize("seed", range(5))
def test_every_finished_output_is_valid(tiny: LoadedModel, maker: Maker, seed: int) -> None:
    requests = [maker.request(f"r{i}", seed=100 * seed + i) for i in range(6)]
    run = finished(tiny, *requests, maker.request("free", spec=None))
    for request in requests:
        assert run.end(request).finish_reason == "stop"
        jsonschema.validate(json.loads(maker.text(run.tokens(request))), SCHEMA)


def test_rl_16_ops_10_a_take_over_at_every_token_ends_alike(tiny: LoadedModel, maker: Maker) -> None:
    first = maker.request()
    tokens = finished(tiny, first).tokens(first)
    assert len(tokens) > 5
    for logged in range(len(tokens)):
        again = maker.request(output_token_ids=tokens[:logged])
        assert tokens[:logged] + finished(tiny, again).tokens(again) == tokens


@pytest.mark.parametrize("at", [1, 4, 9])
def test_preemption_changes_nothing(tiny: LoadedModel, maker: Maker, at: int) -> None:
    first = maker.request()
    tokens = finished(tiny, first).tokens(first)
    run, request = EngineRun(engine_for(tiny)), maker.request()
    run.add(request, maker.request("neighbour", seed=8))
    for _ in range(at):
        run.step()
    run.engine._scheduler._preempt(request)  # as if blocks had run out just now
    assert run.finish().tokens(request) == tokens
    assert request.num_preemptions == 1


def test_a_complete_output_ends_whatever_min_tokens_and_bias_say(tiny: LoadedModel, maker: Maker) -> None:
    stubborn = replace(SAMPLED, min_tokens=55, logit_bias=dict.fromkeys(maker.eos, -100.0))
    request = maker.request(sampling=stubborn)
    run = finished(tiny, request)
    assert run.end(request).finish_reason == "stop"
    jsonschema.validate(json.loads(maker.text(run.tokens(request))), SCHEMA)


def test_min_tokens_holds_while_something_else_can_follow(tiny: LoadedModel, maker: Maker) -> None:
    request = maker.request(spec=GrammarSpec("regex", "[a-z]*"), sampling=replace(SAMPLED, min_tokens=20))
    assert len(finished(tiny, request).tokens(request)) >= 20


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": dict.fromkeys(range(320), -100.0)},
        {"allowed_token_ids": (0,)},
        {"bad_words": tuple((token,) for token in range(320))},
    ],
)
def test_the_grammar_wins_over_fields_that_leave_nothing_of_it(
    tiny: LoadedModel, maker: Maker, fields: dict[str, Any]
) -> None:
    """With the model's own choice among what the grammar allows: the same answer as without those fields."""
    bound, plain = maker.request("bound", sampling=replace(SAMPLED, **fields)), maker.request("plain")
    run = finished(tiny, bound, plain, maker.request("free", spec=None))
    assert run.end(bound).finish_reason == run.end(plain).finish_reason == "stop"
    jsonschema.validate(json.loads(maker.text(run.tokens(bound))), SCHEMA)
    assert run.tokens(bound) == run.tokens(plain)


def test_bans_hold_where_the_grammar_leaves_a_choice(tiny: LoadedModel, maker: Maker) -> None:
    digits = {token: -100.0 for token in range(320) if b"7" in maker.bytes_of(token)}
    request = maker.request(spec=GrammarSpec("regex", "[67]{8}"), sampling=replace(SAMPLED, logit_bias=digits))
    assert maker.text(finished(tiny, request).tokens(request)) == "66666666"


def test_logged_tokens_that_break_the_grammar_are_an_error_and_never_go_on_blindly(
    tiny: LoadedModel, maker: Maker
) -> None:
    request = maker.request(output_token_ids=[9, 9, 9])
    end = finished(tiny, request).end(request)
    assert (end.finish_reason, end.error_code) == ("error", "invalid_value")


def test_logprobs_are_the_models_own(tiny: LoadedModel, maker: Maker) -> None:
    request = maker.request(sampling=replace(SAMPLED, logprobs=2))
    run = finished(tiny, request)
    assert all(event.logprobs is not None for event in run.events["r"] if event.token_id is not None)


def test_the_engine_needs_no_grammar_library() -> None:
    """A machine that only computes may have neither llguidance nor what pods and workers talk with."""
    blocked = ("llguidance", "tokenizers", "msgspec", "pydantic", "redis", "structlog")
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "import engine_worker.engine, shared.grammars.backend as backend\n"
        "assert backend.llguidance is None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).resolve().parents[3])
