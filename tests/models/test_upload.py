from __future__ import annotations

import pytest
import torch

from sol.models.upload import Uploader


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tensors_arrive_whole(dtype: torch.dtype) -> None:
    uploader = Uploader(torch.device("cpu"), piece=64)
    for shape in [(), (1,), (16,), (3, 11), (40, 7), (0, 5)]:
        source = torch.randint(-100, 100, shape).to(dtype)
        found = uploader.upload(source)
        assert found.dtype == dtype
        assert torch.equal(found, source)
    columns = torch.arange(60).view(6, 10).to(dtype).t()
    assert torch.equal(uploader.upload(columns), columns)
