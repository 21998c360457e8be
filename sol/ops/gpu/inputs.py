"""The inputs of a decode step, made on the device: the twin of `sol.runner.device_rows.DeviceRows.decode_inputs`.

The host says of each row which it is, how long it is and which block it was given; its token is what the step before
sampled, which the host need not know. One tiny launch at the beginning of a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sol.ops.gpu.batch import DeviceBatch


def decode_inputs(
    inputs: torch.Tensor, block_table: torch.Tensor, last_token_ids: torch.Tensor, batch: DeviceBatch, block_size: int
) -> None:
    """`inputs` [4, R] int64: entry, token id or -1, length, new block or -1 → the tensors of `batch`, in place.

    `block_table` [entries, max_blocks] int32 gets the new blocks.
    """
    count = inputs.shape[1]
    _decode_inputs_kernel[(count,)](
        inputs,
        block_table,
        last_token_ids,
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.block_table,
        batch.seq_lens,
        count,
        block_table.stride(0),
        batch.block_table.stride(0),
        block_size,
        BLOCK=128,
        num_warps=1,
    )


@triton.jit
def _decode_inputs_kernel(
    inputs,
    block_table,
    last_token_ids,
    token_ids,
    positions,
    slot_mapping,
    batch_table,
    seq_lens,
    count,
    stride_table,
    stride_batch,
    block_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    entry = tl.load(inputs + row)
    token = tl.load(inputs + count + row)
    seq_len = tl.load(inputs + 2 * count + row)
    new_block = tl.load(inputs + 3 * count + row).to(tl.int32)
    position = seq_len - 1
    last = position // block_size
    table = block_table + entry * stride_table
    block = new_block
    if new_block < 0:
        block = tl.load(table + last)
    # The table is read before anything is stored to it: no store has to be waited for.
    for first in range(0, last + 1, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        blocks = tl.load(table + columns, columns < last, other=0)
        tl.store(batch_table + row * stride_batch + columns, tl.where(columns == last, block, blocks), columns <= last)
    tl.store(table + last, block)
    if token < 0:
        token = tl.load(last_token_ids + entry)
    tl.store(token_ids + row, token)
    tl.store(positions + row, position)
    tl.store(slot_mapping + row, block.to(tl.int64) * block_size + position % block_size)
    tl.store(seq_lens + row, seq_len.to(tl.int32))
