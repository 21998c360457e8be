from __future__ import annotations

import numpy as np
import torch

from sol.runner.staging import Staging

CPU = torch.device("cpu")


def test_arrays_arrive_in_their_shapes_and_aligned() -> None:
    staging = Staging(CPU)
    arrays = [np.arange(5), np.arange(6).reshape(2, 3), np.zeros((4, 0), dtype=np.int64), np.array([7])]
    parts = staging.send(*arrays)
    for part, array in zip(parts, arrays, strict=True):
        assert part.tolist() == array.tolist()
        assert part.shape == array.shape
        assert (part.data_ptr() - parts[0].data_ptr()) % 16 == 0


def test_what_was_sent_outlives_the_buffers() -> None:
    staging = Staging(CPU)
    sent = [staging.send(np.full(3000, number))[0] for number in range(9)]
    assert [int(part.sum()) for part in sent] == [3000 * number for number in range(9)]


def test_a_result_is_what_it_was_when_it_was_asked_for() -> None:
    staging = Staging(CPU)
    source = torch.arange(4)
    reads = []
    for _ in range(6):
        reads.append(staging.read_later(source))
        source += 10
    assert [read() for read in reads] == [[10 * n, 10 * n + 1, 10 * n + 2, 10 * n + 3] for n in range(6)]
