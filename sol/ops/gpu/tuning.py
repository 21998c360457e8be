"""Which block sizes a projection runs with: measured where a shape has been measured, else by rule.

A configuration fixes the order of a product's additions, so it must not depend on anything but the shape and the
class of token counts (up to 16, 32, 64 or 128): inside a class results have the same bits. Of the last class only
those matrices were entered that are faster so than with cuBLAS.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Final


@dataclass(frozen=True, slots=True)
class LinearConfig:
    block_tokens: int
    block_rows: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    early: bool = True
    """The next kernel may start before the one ahead has ended (else: only after)"""


LARGEST_CLASS: Final = 128


def token_class(tokens: int) -> int:
    """16, 32, 64 or 128: what a number of tokens is padded to."""
    return next(size for size in (16, 32, 64, LARGEST_CLASS) if tokens <= size)


@functools.cache
def linear_config(rows: int, columns: int, tokens: int, item_bytes: int, large_tiles: bool) -> LinearConfig:
    """For weights [rows, columns] of `item_bytes` each; measured ones need `large_tiles` (227 KiB of shared memory)."""
    measured = measured_config(rows, columns, tokens, item_bytes, large_tiles)
    return measured or _rule(rows, columns, token_class(tokens), item_bytes)


def measured_config(rows: int, columns: int, tokens: int, item_bytes: int, large_tiles: bool) -> LinearConfig | None:
    return table().get((rows, columns, token_class(tokens))) if large_tiles and item_bytes == 2 else None


def _rule(rows: int, columns: int, tokens: int, item_bytes: int) -> LinearConfig:
    """For shapes nobody has measured: work for every processor, and at most 96 KiB of shared memory."""
    block_rows = 64 if rows >= 64 else 16
    block_k = 128
    while block_k > 32 and (columns % block_k or 4 * (block_rows + tokens) * block_k * item_bytes > 96 << 10):
        block_k //= 2
    tiles = -(-rows // block_rows)
    split_k = 1
    while tiles * split_k < 128 and split_k < 8 and columns >= 8 * split_k * block_k:
        split_k *= 2
    return LinearConfig(tokens, block_rows, block_k, split_k, 4, 4)


@functools.cache
def table() -> dict[tuple[int, int, int], LinearConfig]:
    """What has been measured, by rows, columns and token class."""
    text = resources.files("sol.ops.gpu").joinpath("tuned_linear.json").read_text(encoding="utf-8")
    rows = map(json.loads, text.splitlines())
    return {
        (row["rows"], row["columns"], row["tokens"]): LinearConfig(block_tokens=row["tokens"], **row["config"])
        for row in rows
    }
