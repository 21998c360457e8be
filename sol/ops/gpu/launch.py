"""What every launch needs to know: whether Triton interprets, and whether kernels may overlap.

Programmatic dependent launch (PDL, Hopper and newer): a kernel's programs start while those of the kernel before still
run, prefetch what does not depend on it (weights), and wait for its end before they read what it wrote. Each kernel
here waits, so that "the kernel before has ended" implies the same of all before it. Before its wait a kernel may only
read what no kernel of the forward pass writes, and it writes nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run under Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 at import)."""

DOT_PRECISION = tl.constexpr("ieee")
"""Of float32 products; 16-bit ones have one precision only."""


@functools.cache
def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: the kernel's `PDL` and, where it is on, the launch attribute."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(device) else {"PDL": False}


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; as many as an H200 has where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.cache
def has_large_tiles(device: torch.device) -> bool:
    """Whether a program may have the shared memory of a Hopper GPU's (227 KiB); others have as little as 99."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 227 << 10


@triton.jit
def prefetch_l2(pointers):
    """Asks for the cache line at each pointer; nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


class Counters:
    """Of programs that have ended, where the last one has more to do; zero between launches. For one stream."""

    def __init__(self, device: torch.device) -> None:
        self._all = [torch.zeros(1 << 15, dtype=torch.int32, device=device)]

    def of(self, count: int) -> torch.Tensor:
        """[at least `count`] int32. Earlier ones stay: a graph may have been captured with them."""
        if count > self._all[-1].shape[0]:
            self._all.append(torch.zeros(count, dtype=torch.int32, device=self._all[-1].device))
        return self._all[-1]
