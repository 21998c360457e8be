"""What torch's CPU operations cost the reference ops: the measurements behind docs/kernels.md.

1. One token through a matrix stored along rows or along columns, and more tokens: GB/s of weights read. The loader
   stores a matrix along its longer side; the bars are on that choice, at one token.
2. Gumbel noise for one row of SmolLM2's vocabulary.
3. One stream beside busy processes, by how OpenMP's threads wait (a process each: the setting counts at its start).

    python benchmarks/cpu_torch.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from common import Report, arguments

from sol.sampling.noise import gumbel, stream_key

MATRICES = {"gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
WAITING = {"default": {}, "GOMP_SPINCOUNT=4000": {"GOMP_SPINCOUNT": "4000"}, "passive": {"OMP_WAIT_POLICY": "passive"}}
STREAM = """
import time, torch
from sol import LLM, SamplingParams
llm = LLM(max_model_len=128, speculation="off")
params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24, detokenize=False)
for _ in range(2):
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": list(range(100, 116))}], params, use_tqdm=False)
print(24 / (time.perf_counter() - begin))
"""
"""torch is imported first, so that what `sol.LLM` would set comes too late and the environment decides."""


def seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - begin) / repeats)
    return statistics.median(times)


@torch.inference_mode()
def products(report: Report, token_counts: tuple[int, ...]) -> None:
    for name, (rows, columns) in MATRICES.items():
        copies = max(2, 2**27 // (rows * columns))  # together larger than any cache
        by_rows = [torch.randn(rows, columns) for _ in range(copies)]
        by_columns = [matrix.t().contiguous().t() for matrix in by_rows]
        for tokens in token_counts:
            x = torch.randn(tokens, columns)
            speeds = {}
            for layout, matrices in (("rows", by_rows), ("columns", by_columns)):
                turn = iter(range(10**9))

                def product(
                    x: torch.Tensor = x, matrices: list[torch.Tensor] = matrices, turn: Iterator[int] = turn
                ) -> torch.Tensor:
                    return F.linear(x, matrices[next(turn) % len(matrices)])

                speeds[layout] = rows * columns * 4 / seconds(product, max(1, 20_000_000 // (rows * columns))) / 1e9
            report.row(
                what=name, tokens=tokens, GB_s_by_rows=round(speeds["rows"], 1),
                GB_s_by_columns=round(speeds["columns"], 1),
            )  # fmt: skip
            if tokens == 1:
                chosen, other = ("columns", "rows") if rows > columns else ("rows", "columns")
                report.at_least(f"{name}_{chosen}_over_{other}", speeds[chosen] / speeds[other], 1.0)


def stream_beside(busy: int, environment: dict[str, str]) -> float:
    """Tokens a second of one stream, beside `busy` processes that never wait."""
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", STREAM], env=plain | environment, capture_output=True, text=True, check=True
        )
    finally:
        for other in others:
            other.kill()
            other.wait()
    return float(done.stdout.split()[-1])


def main() -> int:
    args = arguments(__doc__ or "").parse_args()
    report = Report("cpu_torch", args.quick)
    products(report, (1, 2) if args.quick else (1, 2, 3, 4, 16, 128))
    ids, key = torch.arange(49152), stream_key(0, 0, 0)
    report.row(what="noise, one row", us=round(seconds(lambda: gumbel(key, ids), 20) * 1e6))
    for busy in (0, 1) if args.quick else (0, 1, 2):
        for name, environment in WAITING.items():
            if args.quick and (name == "passive" or (busy and name == "default")):
                continue
            speed = stream_beside(busy, environment)
            report.row(what=f"one stream beside {busy} busy", waiting=name, tokens_per_s=round(speed, 1))
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
