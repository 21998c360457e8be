"""The GPU kernels on the card that is there: are they right, how fast are they, and where does a step's time go.

    python benchmarks/gpu.py projections attention bits
                                                against the reference ops in float32, and bit for bit among themselves
    python benchmarks/gpu.py ceilings           read bandwidth and matrix rate
    python benchmarks/gpu.py tune [--tokens 16] the best block sizes for Llama-3-8B's matrices, as lines of JSON
    python benchmarks/gpu.py tune_attention     the same for attention
    python benchmarks/gpu.py profile            kernel by kernel, by CUPTI
    python benchmarks/gpu.py kernels            each projection beside cuBLAS and the floor
    python benchmarks/gpu.py step               a decode step in a CUDA graph, whole and without some of its parts
    python benchmarks/gpu.py prefill            steps of 2,048 tokens, of the last 2,048 of 8,000, and of all 8,000

Several may be given; each prints lines, and `--json FILE` gets them all as JSON lines with card, versions and date.
Shapes are Llama-3-8B's with random weights; `--small` takes tiny ones (to try the script, also under TRITON_INTERPRET=1
on a CPU).
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_check import PARTS, check
from gpu_model import LLAMA_3_8B, SMALL, DecodeBatch, Projection, Shape, make_program
from gpu_tune import tune, tune_attention

from sol.ops import KVCache, Linear, Norm, run
from sol.ops.gpu.ops import GpuOps
from sol.ops.program import AttentionInput, MlpInput, PagedAttention

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@dataclass
class Results:
    rows: list[dict[str, Any]]

    def add(self, kind: str, **values: Any) -> None:
        self.rows.append({"kind": kind} | values)
        print(kind, *(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                      for key, value in values.items()), flush=True)  # fmt: skip


def timed(function: Callable[[], Any], *, launches: int = 1, repeats: int = 10, graph: bool = True) -> float:
    """Milliseconds of one of `launches` that `function` makes: the median over replays of a CUDA graph of them."""
    if not CUDA:
        begin = time.perf_counter()
        function()
        return (time.perf_counter() - begin) * 1e3 / launches
    function()
    torch.cuda.synchronize()
    replay = function
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            function()
        replay = captured.replay
    for _ in range(2):
        replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / launches


def ceilings(results: Results, shape: Shape) -> None:
    count = 1 << (32 if shape is LLAMA_3_8B else 16)
    data = torch.ones(count // 4, dtype=torch.float32, device=DEVICE)
    ms = timed(lambda: data.sum())
    results.add("read_bandwidth", gb_s=data.nbytes / ms / 1e6, method="sum of 4 GiB of float32")
    target = torch.empty_like(data)
    ms = timed(lambda: target.copy_(data))
    results.add("copy_bandwidth", gb_s=2 * data.nbytes / ms / 1e6)
    size = 8192 if shape is LLAMA_3_8B else 64
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    ms = timed(lambda: a @ b)
    results.add("matrix_rate", tflop_s=2 * size**3 / ms / 1e9, size=size)


def kernels(results: Results, shape: Shape) -> None:
    """Each projection over as many distinct matrices as lie well outside the caches."""
    for name, rows, columns in shape.matrices():
        size = rows * columns * 2
        count = max(2, min(16, int(6e8 // size)))
        dtype = torch.bfloat16 if CUDA else torch.float16
        weights = [torch.randn(rows, columns, device=DEVICE, dtype=dtype) for _ in range(count)]
        for tokens in (1, 6, 16, 32, 64):
            projection = Projection(shape, name, tokens, DEVICE)
            mine = timed(lambda: [projection(weight) for weight in weights], launches=count)  # noqa: B023
            x = projection.x
            theirs = timed(lambda: [torch.mm(x, weight.t()) for weight in weights], launches=count)  # noqa: B023
            results.add("linear", matrix=name, rows=rows, columns=columns, tokens=tokens, us=mine * 1e3,
                        gb_s=size / mine / 1e6, cublas_us=theirs * 1e3, cublas_gb_s=size / theirs / 1e6)  # fmt: skip


class Without(GpuOps):
    """The ops with some left out, to see what they cost."""

    def __init__(self, device: torch.device, left_out: str) -> None:
        super().__init__(device)
        self._left_out = left_out

    def attention_input(self, residual: torch.Tensor, op: AttentionInput, plan: Any) -> torch.Tensor:
        if self._left_out == "qkv":
            heads, _, size = plan.heads
            return residual[:, : heads * size].view(-1, heads, size)
        return super().attention_input(residual, op, plan)

    def paged_attention(self, q: torch.Tensor, op: PagedAttention, plan: Any) -> torch.Tensor:
        return q.view(q.shape[0], -1) if self._left_out == "attention" else super().paged_attention(q, op, plan)

    def mlp_input(self, residual: torch.Tensor, op: MlpInput) -> torch.Tensor:
        if self._left_out == "gate_up":
            return residual.repeat(1, 4)[:, : sum(s.weight.shape[0] for s in op.gate_up.segments) // 2]
        return super().mlp_input(residual, op)

    def project_residual(
        self, x: torch.Tensor, weight: Linear, residual: torch.Tensor, norm: Norm | None = None
    ) -> torch.Tensor:
        narrow = x.shape[1] == residual.shape[1]
        if self._left_out == ("o" if narrow else "down"):
            return residual
        return super().project_residual(x, weight, residual, norm)

    def logits(self, residual: torch.Tensor, norm: Norm, head: Linear, softcap: float | None = None) -> torch.Tensor:
        return residual if self._left_out == "head" else super().logits(residual, norm, head, softcap)


def step(results: Results, shape: Shape, cases: list[tuple[int, int, int]], parts: bool) -> None:
    """Cases: (requests, context, tokens of each)."""
    program = make_program(shape, DEVICE)
    for requests, context, query_len in cases:
        batch = DecodeBatch(shape, requests, context, query_len, DEVICE)
        cache = KVCache(batch.cache)

        def forward(ops: GpuOps, batch: DecodeBatch = batch, cache: KVCache = cache) -> float:
            return timed(lambda: run(program, ops, batch.batch, cache), repeats=7)

        whole = forward(GpuOps(DEVICE))
        values: dict[str, Any] = {"requests": requests, "context": context, "query_len": query_len, "ms": whole}
        if requests * query_len <= 64 and parts:
            values["cublas_ms"] = forward(GpuOps(DEVICE, max_fused_tokens=0))
        if parts:
            for part in ("qkv", "attention", "o", "gate_up", "down", "head"):
                values[f"{part}_ms"] = whole - forward(Without(DEVICE, part))
        results.add("step", **values)
        del batch, cache
        if CUDA:
            torch.cuda.empty_cache()


def prefill(results: Results, shape: Shape) -> None:
    program = make_program(shape, DEVICE)
    for context, query_len in ((2048, 2048), (8000, 2048), (8000, 8000)) if shape is LLAMA_3_8B else ((40, 40),):
        batch = DecodeBatch(shape, 1, context, query_len, DEVICE, last_only=True)
        cache = KVCache(batch.cache)
        ms = timed(lambda: run(program, GpuOps(DEVICE), batch.batch, cache), repeats=5)  # noqa: B023
        without = timed(lambda: run(program, Without(DEVICE, "attention"), batch.batch, cache), repeats=5)  # noqa: B023
        eager = timed(lambda: run(program, GpuOps(DEVICE), batch.batch, cache), repeats=5, graph=False)  # noqa: B023
        results.add("prefill", tokens=query_len, context=context, ms=ms, attention_ms=ms - without, eager_ms=eager)


def profile(shape: Shape) -> None:
    """What CUPTI says each kernel took; kernels that overlap count the time they wait."""
    program = make_program(shape, DEVICE)
    for requests, context, query_len in ((8, 128, 1), (64, 128, 1), (128, 128, 1), (256, 128, 1), (1, 8000, 8000)):
        batch = DecodeBatch(shape, requests, context, query_len, DEVICE, last_only=query_len > 1)
        cache, ops = KVCache(batch.cache), GpuOps(DEVICE)
        run(program, ops, batch.batch, cache)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(program, ops, batch.batch, cache)
        graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            graph.replay()
            torch.cuda.synchronize()
        print(f"profile: {requests} requests, context {context}, {query_len} tokens each")
        events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
        for event in events[:9]:
            print(f"  {event.device_time_total / 1e3:8.3f} ms {event.count:4d} x {event.key[:90]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        nargs="+",
        choices=(*PARTS, "ceilings", "tune", "tune_attention", "profile", "kernels", "step", "parts", "prefill"),
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[16], choices=(16, 32, 64), help="of tune")
    parser.add_argument("--processes", type=int, default=14, help="that compile, in tune")
    parser.add_argument("--trials", type=int, default=40, help="configurations a matrix, in tune")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to this file")
    args = parser.parse_args()
    shape = SMALL if args.small or not CUDA else LLAMA_3_8B
    results = Results([])
    failed = 0
    torch.manual_seed(0)
    for what in args.what:
        begin = time.perf_counter()
        with torch.inference_mode():
            if what in PARTS:
                failed += check(results.add, shape, DEVICE, what)
            elif what == "ceilings":
                ceilings(results, shape)
            elif what == "tune_attention":
                tune_attention(results.add, timed, shape, DEVICE, args.processes)
            elif what == "profile":
                profile(shape)
            elif what == "tune":
                tune(results.add, timed, shape, DEVICE, args.tokens, args.trials, args.processes)
            elif what == "kernels":
                kernels(results, shape)
            elif what == "step":
                contexts = ((128, (1, 8, 16, 32, 64, 128, 256)), (2048, (1, 8, 32))) if CUDA else ((9, (1, 3)),)
                cases = [(n, context, 1) for context, batches in contexts for n in batches]
                step(results, shape, [*cases, (1, 128, 6)], parts=False)
            elif what == "parts":
                step(results, shape, [(1, 128, 1), (8, 128, 1), (32, 128, 1), (1, 2048, 1), (32, 2048, 1)], parts=True)
            else:
                prefill(results, shape)
        print(f"# {what}: {time.perf_counter() - begin:.1f} s", flush=True)
        if CUDA:
            torch.cuda.empty_cache()
    if args.json is not None:
        head = {
            "benchmark": "gpu",
            "date": datetime.date.today().isoformat(),
            "card": torch.cuda.get_device_name() if CUDA else "none",
            "versions": {"torch": torch.__version__, "triton": __import__("triton").__version__},
        }
        with args.json.open("a", encoding="utf-8") as file:
            for row in results.rows:
                file.write(json.dumps(head | row) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
