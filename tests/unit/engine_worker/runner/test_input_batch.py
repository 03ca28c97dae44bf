"""The tensors of a step, against positions and slots written out by hand."""

from __future__ import annotations

import pytest
import torch

from engine_worker.plan import ScheduledRequest
from engine_worker.runner.input_batch import InputBatch, ModelInput
from tests.support.rows import make_row


def make_batch(max_rows: int = 4, block_size: int = 4) -> InputBatch:
    return InputBatch(max_rows, 64, 40, block_size, torch.device("cpu"))


def by_hand(rows: list[ScheduledRequest], block_size: int) -> tuple[list[int], list[int], list[int]]:
    """Token ids, positions and slots, one token after the other."""
    ids, positions, slots = [], [], []
    for row in rows:
        known = row.prompt_token_ids + row.output_token_ids
        for position in range(row.start, row.start + row.num_new_tokens):
            ids.append(known[position])
            positions.append(position)
            slots.append(row.block_table[position // block_size] * block_size + position % block_size)
    return ids, positions, slots


def assert_matches(inputs: ModelInput, rows: list[ScheduledRequest], block_size: int = 4) -> None:
    ids, positions, slots = by_hand(rows, block_size)
    layout = inputs.layout
    assert inputs.token_ids.tolist() == ids
    assert layout.positions.tolist() == positions
    assert layout.slot_mapping.tolist() == slots
    assert layout.seq_lens.tolist() == [row.start + row.num_new_tokens for row in rows]
    counts = [row.num_new_tokens for row in rows]
    assert layout.query_start.tolist() == [sum(counts[:i]) for i in range(len(rows) + 1)]
    assert (layout.num_tokens, layout.max_query_len) == (len(ids), max(counts))
    assert layout.max_seq_len == int(layout.seq_lens.max())
    for row, table in zip(rows, layout.block_tables.tolist(), strict=True):
        needed = -(-(row.start + row.num_new_tokens) // block_size)
        assert table[:needed] == row.block_table[:needed]
    ends = layout.query_start[1:].tolist()
    wanted = [end - 1 for row, end in zip(rows, ends, strict=True) if row.samples]
    if inputs.sample_at is None:
        assert wanted == list(range(layout.num_tokens))
    else:
        assert inputs.sample_at.tolist() == wanted


def test_chunks_decodes_and_catching_up_share_a_batch() -> None:
    rows = [
        make_row(range(10, 20), [], request_id="chunk", start=4, num_new_tokens=5, block_table=[7, 1, 3]),
        make_row([1, 2], [30, 31, 32], request_id="decode", start=4, block_table=[5, 2]),
        make_row([1, 2, 3], [40, 41, 42], request_id="catching up", start=1, num_new_tokens=4, block_table=[8, 9]),
        make_row([5], [60, 61], request_id="output only", start=1, block_table=[4]),
    ]
    assert_matches(make_batch().build(rows), rows)


def test_a_batch_of_decodes_samples_every_token() -> None:
    rows = [make_row([1, 2], [3], request_id=str(i), start=2, block_table=[i]) for i in range(3)]
    inputs = make_batch().build(rows)
    assert inputs.sample_at is None
    assert_matches(inputs, rows)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_rows_that_grow_join_leave_and_come_back_keep_their_own_blocks(block_size: int) -> None:
    batch = make_batch(max_rows=2, block_size=block_size)
    free = iter(range(1000))
    tables: dict[str, list[int]] = {}
    lengths = dict.fromkeys("abcd", 0)
    for step, pair in enumerate(["a", "ab", "ab", "b", "bc", "cd", "da", "ab", "b", "ab"]):
        rows = []
        for name in pair:
            if name not in tables or step == 6:
                # Admitted, or admitted again after a preemption: a new list, all to be computed.
                tables[name], lengths[name] = [], 0
            start, lengths[name] = lengths[name], lengths[name] + 1 + step % 3
            while len(tables[name]) * block_size < lengths[name]:
                tables[name].append(next(free))
            tokens = range(100, 100 + lengths[name])
            rows.append(make_row(tokens, [], request_id=name, start=start, block_table=tables[name]))
        assert_matches(batch.build(rows), rows, block_size)
