"""What stays on the device between steps: of each request its block table, last token and sampling parameters.

A request has an entry from its first step until it is removed. One more entry is everybody's who fills up a batch: a
greedy request of one token in the scratch block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sol.ops.gpu.batch import DeviceBatch
from sol.sampling.batched import SamplingParameters
from sol.sampling.processing import SamplingRow


class DeviceRows:
    """`num_rows` entries and the padding's, which is the last."""

    def __init__(self, num_rows: int, max_blocks: int, scratch_block: int, device: torch.device) -> None:
        self.padding = num_rows
        self.block_table = torch.zeros((num_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self.block_table[self.padding, 0] = scratch_block
        self.last_token_ids = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.parameters = SamplingParameters.empty(num_rows + 1, device)
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self) -> int:
        if not self._free:
            raise RuntimeError("the plan adds more requests than max_num_seqs")
        return self._free.pop()

    def give_back(self, entry: int) -> None:
        self._free.append(entry)

    def set_parameters(self, entries: torch.Tensor, packed: torch.Tensor) -> None:
        """`entries` [n] int64 on the device get what `pack_parameters` made, [6, n] int64 on the device."""
        for target, source in zip(self.parameters.tensors(), packed, strict=True):
            values = source.view(torch.float64) if target.is_floating_point() else source
            target.index_copy_(0, entries, values.to(target.dtype))

    def decode_inputs(self, inputs: torch.Tensor, batch: DeviceBatch, block_size: int) -> None:
        """`sol.ops.gpu.inputs.decode_inputs` in torch: what each row of a decode step reads, and where it writes."""
        entries, tokens, seq_lens, new_blocks = inputs
        positions = seq_lens - 1
        last = positions // block_size
        blocks = torch.where(new_blocks < 0, self.block_table[entries, last].long(), new_blocks)
        self.block_table[entries, last] = blocks.int()
        batch.token_ids.copy_(torch.where(tokens < 0, self.last_token_ids[entries], tokens))
        batch.positions.copy_(positions)
        batch.slot_mapping.copy_(blocks * block_size + positions % block_size)
        batch.block_table.copy_(self.block_table[entries])
        batch.seq_lens.copy_(seq_lens)


def pack_parameters(rows: Sequence[SamplingRow]) -> npt.NDArray[np.int64]:
    """[6, n]: one line a tensor of `SamplingParameters`, floats as the bits of a float64."""
    parameters = SamplingParameters.empty(len(rows), torch.device("cpu"))
    for index, row in enumerate(rows):
        parameters.fill(index, row)
    lines = [
        tensor.double().view(torch.int64) if tensor.is_floating_point() else tensor.long()
        for tensor in parameters.tensors()
    ]
    packed: npt.NDArray[np.int64] = torch.stack(lines).numpy()
    return packed
