"""The CPU's projections one by one: every instruction set, format and number of tokens, on one thread.

Weights in cache show what the arithmetic allows, the large matrix (a vocabulary's head) what memory does: beside it
stands what numpy reads of the same bytes in the same run. The bar: every result of an instruction set is the same
whether a row's tokens come one at a time or together.

    python benchmarks/cpu_kernels.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from common import Report, arguments

from sol.ops.cpu import native as binding
from sol.ops.cpu.native import Format, Isa, Native
from sol.ops.weights import Packed

FORMATS = {
    "F32": (Format.F32, 0),
    "F16": (Format.F16, 0),
    "Q4_0": (Format.Q4_0, 0),
    "Q4_1": (Format.Q4_1, 0),
    "Q5_0": (Format.Q5_0, 0),
    "Q8_0": (Format.Q8_0, 0),
    "Q4_K": (Format.Q4_K, 0),
    "Q6_K": (Format.Q6_K, 0),
    "INT8": (Format.INT8, 0),
    "INT4 g64": (Format.INT4, 64),
}
ROW_NBYTES = {
    Format.F32: (1, 4), Format.F16: (1, 2), Format.Q4_0: (32, 18), Format.Q4_1: (32, 20), Format.Q5_0: (32, 22),
    Format.Q8_0: (32, 34), Format.Q4_K: (256, 144), Format.Q6_K: (256, 210), Format.INT8: (1, 1), Format.INT4: (2, 1),
}  # fmt: skip
TOKENS = (1, 2, 4, 6, 8, 16, 64, 512)


def random_weight(library: Native, isa: Isa, kind: Format, group: int, rows: int, cols: int) -> Packed:
    """Any bytes are quantised weights once no scale's exponent among them is the largest; speed does not depend on
    which. Floats are normal ones: some processors take a hundred times as long with others."""
    block, nbytes = ROW_NBYTES[kind]
    random = np.random.default_rng(0)
    data: npt.NDArray[Any]
    if kind in (Format.F32, Format.F16):
        data = random.standard_normal((rows, cols), dtype=np.float32)
        data = data.astype(np.float16) if kind == Format.F16 else data
    else:
        data = random.integers(0, 256, rows * (cols // block) * nbytes, dtype=np.uint8) & 0xBB
    scales = zeros = None
    if kind == Format.INT8:
        scales = np.full(rows, 0.01, dtype=np.float32)
    elif kind == Format.INT4:
        scales = np.full(rows * cols // group, 0.01, dtype=np.float32)
        zeros = np.full(rows * cols // group, 8, dtype=np.uint8)
    out = np.zeros(library.packed_nbytes(isa, kind, rows, cols, group) + 64, dtype=np.uint8)
    start = -out.ctypes.data % 64
    out = out[start : len(out) - 64 + start]
    library.pack(isa, kind, rows, cols, group, data, scales, zeros, out)
    return Packed(kind, rows, cols, group, out, None)


def seconds(run: Callable[[], object], budget: float) -> float:
    """The fastest of as many runs as fit: other processes only ever add time."""
    best, ends = float("inf"), time.perf_counter() + budget
    while True:
        begin = time.perf_counter()
        run()
        end = time.perf_counter()
        best = min(best, end - begin)
        if end > ends:
            return best


def activations(tokens: int, cols: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((tokens, cols), dtype=np.float32)


def independent_of_tokens(library: Native, isa: Isa, weight: Packed) -> bool:
    x = activations(17, weight.in_features)
    together = library.linear(isa, [weight], x)
    alone = np.concatenate([library.linear(isa, [weight], row[None]) for row in x])
    return bool(np.array_equal(together, alone, equal_nan=True))


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    report = Report("cpu_kernels", options.quick)
    library = binding.load()
    budget = 0.03 if options.quick else 0.25
    same = checked = 0
    for isa in [isa for isa in library.isas() if isa != Isa.PORTABLE]:
        for name, (kind, group) in FORMATS.items():
            cached = random_weight(library, isa, kind, group, 512, 1536)
            checked += 1
            same += independent_of_tokens(library, isa, cached)
            columns = {}
            for tokens in (1, 6, 64) if options.quick else TOKENS:
                x = activations(tokens, cached.in_features)
                taken = seconds(partial(library.linear, isa, [cached], x), budget)
                columns[f"GOP/s, {tokens}"] = round(2e-9 * tokens * cached.rows * cached.in_features / taken, 1)
            large = random_weight(library, isa, kind, group, 49152, 512)
            x = activations(1, large.in_features)
            taken = seconds(partial(library.linear, isa, [large], x), budget)
            words = large.data[: len(large.data) // 8 * 8].view(np.int64)
            read = seconds(words.max, budget)
            report.row(
                isa=isa.name.lower(),
                format=name,
                **columns,
                **{
                    "large, GB/s": round(large.data.nbytes / taken / 1e9, 1),
                    "of numpy's read": round(read / taken, 2),
                },
            )
    report.at_least("share of formats whose results do not depend on the number of tokens", same / checked, 1.0)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
