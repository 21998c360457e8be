"""The kernel that makes a decode step's inputs does what its torch twin does."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from sol.ops.gpu.batch import DeviceBatch
from sol.ops.gpu.inputs import decode_inputs
from sol.runner.device_rows import DeviceRows

CPU = torch.device("cpu")


def make_batch(size: int, max_blocks: int) -> DeviceBatch:
    return DeviceBatch(
        token_ids=torch.full((size,), -9),
        positions=torch.full((size,), -9),
        slot_mapping=torch.full((size,), -9),
        block_table=torch.full((size, max_blocks), -9, dtype=torch.int32),
        query_start_loc=torch.arange(size + 1, dtype=torch.int32),
        seq_lens=torch.full((size,), -9, dtype=torch.int32),
        logits_rows=slice(None),
        max_query_len=1,
        max_seq_len=max_blocks * 16,
    )


@pytest.mark.parametrize("block_size", [1, 16])
def test_parity(block_size: int) -> None:
    rng = random.Random(block_size)
    max_blocks, scratch = 300, 9999
    rows = [DeviceRows(7, max_blocks, scratch, CPU) for _ in range(2)]
    table = torch.randint(0, 5000, (7, max_blocks)).int()
    last = torch.arange(7) + 100
    for row in rows:
        row.block_table[:7] = table
        row.last_token_ids[:7] = last
    lengths = [1, block_size, block_size + 1, 129 * block_size, 300 * block_size - (block_size > 1)]
    entries = rng.sample(range(7), len(lengths))
    new_blocks = [-1, -1, 7777, 8888, -1]
    inputs = torch.tensor(
        [
            [*entries, rows[0].padding, rows[0].padding],
            [5, -1, 0, -1, 77, 0, 0],
            [*lengths, 1, 1],
            [*new_blocks, -1, -1],
        ]
    )
    found, wanted = (make_batch(7, max_blocks) for _ in range(2))
    decode_inputs(inputs, rows[0].block_table, rows[0].last_token_ids, found, block_size)
    rows[1].decode_inputs(inputs, wanted, block_size)
    assert torch.equal(rows[0].block_table, rows[1].block_table)
    for name in ("token_ids", "positions", "slot_mapping", "seq_lens"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for row, length in enumerate([*lengths, 1, 1]):
        blocks = -(-length // block_size)
        assert torch.equal(found.block_table[row, :blocks], wanted.block_table[row, :blocks])
        assert (found.block_table[row, blocks:] == -9).all()  # nothing is written past a row's end
    assert found.slot_mapping[5:].tolist() == [scratch * block_size] * 2
