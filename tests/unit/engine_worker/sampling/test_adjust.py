"""Penalties against a token-by-token calculation, incremental against rebuilt, prompt against output."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine_worker.plan import ScheduledRequest
from engine_worker.sampling.adjust import Adjuster
from tests.support.rows import make_row

VOCAB = 40


def make_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1))


def adjusted(logits: torch.Tensor, *rows: ScheduledRequest, adjuster: Adjuster | None = None) -> torch.Tensor:
    result = logits.clone()
    (adjuster or Adjuster()).adjust(result, rows)
    return result


def by_hand(logits: torch.Tensor, row: ScheduledRequest) -> list[float]:
    """One token after the other, as the papers and OpenAI's documentation write it."""
    p = row.sampling
    counts = Counter(row.output_token_ids)
    result = []
    for token, logit in enumerate(logits.tolist()):
        seen = token in counts or token in row.prompt_token_ids
        factor = p.repetition_penalty if seen else 1.0
        repeated = logit / factor if logit > 0 else logit * factor
        result.append(repeated - p.frequency_penalty * counts[token] - p.presence_penalty * (counts[token] > 0))
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"presence_penalty": 0.7},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    ],
)
def test_penalties_are_those_of_the_formulas(params: dict[str, float]) -> None:
    logits = make_logits(1)
    row = make_row([1, 2, 2, 3], [3, 4, 4, 4, 9], **params)
    assert adjusted(logits, row)[0].tolist() == pytest.approx(by_hand(logits[0], row), abs=1e-6)


def test_presence_and_frequency_look_at_the_output_only() -> None:
    logits = make_logits(1)
    row = make_row([1, 2, 3], [], presence_penalty=2.0, frequency_penalty=2.0)
    assert torch.equal(adjusted(logits, row), logits)


def test_rows_without_penalties_are_left_alone_and_each_has_its_own() -> None:
    logits = make_logits(4)
    rows = [
        make_row([1], [2], request_id="a"),
        make_row([1], [2, 2], request_id="b", frequency_penalty=1.0),
        make_row([1], [2], request_id="c"),
        make_row([5], [6], request_id="d", repetition_penalty=2.0),
    ]
    result = adjusted(logits, *rows)
    for i, row in enumerate(rows):
        assert result[i].tolist() == pytest.approx(by_hand(logits[i], row), abs=1e-6)
    assert torch.equal(result[[0, 2]], logits[[0, 2]])


def test_counting_step_by_step_equals_counting_anew() -> None:
    adjuster, logits, output = Adjuster(), make_logits(1), []
    for token in [4, 4, 7, 1, 4, 9, 7]:
        row = make_row([1, 2], output, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.3)
        assert torch.equal(adjusted(logits, row, adjuster=adjuster), adjusted(logits, row))
        output.append(token)


def test_a_request_that_paused_or_another_of_the_same_id_is_counted_anew() -> None:
    adjuster, logits, output = Adjuster(), make_logits(1), [4]
    row = make_row([1], output, frequency_penalty=0.5)
    adjusted(logits, row, adjuster=adjuster)
    adjusted(logits, make_row(request_id="other"), adjuster=adjuster)
    output += [5, 5]
    assert torch.equal(adjusted(logits, row, adjuster=adjuster), adjusted(logits, row))
    successor = make_row([1], [9], frequency_penalty=0.5)
    assert torch.equal(adjusted(logits, successor, adjuster=adjuster), adjusted(logits, successor))


def test_sc_03_a_take_over_is_penalised_like_the_uninterrupted_run() -> None:
    logits, output = make_logits(1), [4, 4, 7]
    uninterrupted, params = Adjuster(), {"presence_penalty": 0.4, "frequency_penalty": 0.1, "repetition_penalty": 1.2}
    for count in range(len(output) + 1):
        live = output[:count]
        last = adjusted(logits, make_row([1, 4], live, **params), adjuster=uninterrupted)
    assert torch.equal(last, adjusted(logits, make_row([1, 4], output, **params)))


def test_bias_is_added_after_penalties_and_minimum_length_has_the_last_word() -> None:
    logits = make_logits(1)
    row = make_row([1], [2], stop={3}, min_tokens=5, logit_bias={2: 4.0, 3: 50.0, 6: -100.0}, presence_penalty=1.0)
    result = adjusted(logits, row)[0]
    assert float(result[2]) == pytest.approx(float(logits[0, 2]) - 1.0 + 4.0, abs=1e-6)
    assert float(result[3]) == -torch.inf
    assert float(result[6]) == -torch.inf
